// The standard library, fmt and errors: precompiled for every room, whose files do not repeat them.
#pragma once
#include <bits/stdc++.h>  // libstdc++'s own header for this; LibTorch's wheel needs libstdc++
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
