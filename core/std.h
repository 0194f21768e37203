// The standard library and fmt: precompiled for every room, whose files do not repeat its headers.
#pragma once
#include <bits/stdc++.h>  // libstdc++'s own header for this; LibTorch's wheel needs libstdc++
#include <fmt/format.h>
#include <fmt/ranges.h>
