// The precompiled header of operators/: core/pch.h and autograd's custom functions.
#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include "core/pch.h"
