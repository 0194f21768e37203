// The standard library, fmt and errors: precompiled for every room, whose files do not repeat them.
#pragma once
#include <bits/stdc++.h>  // libstdc++'s own header for this; LibTorch's wheel needs libstdc++
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"

namespace pith {

namespace fs = std::filesystem;
// A count as containers and as floating-point code want it.
constexpr size_t index(std::integral auto number) { return static_cast<size_t>(number); }
constexpr double real(std::integral auto number) { return static_cast<double>(number); }

}
