// The standard library, fmt and errors, precompiled for every room: files do not repeat them.
#pragma once
#include <bits/stdc++.h> // libstdc++, as LibTorch's wheel
#include <fmt/format.h>
#include <fmt/ranges.h>
#include "core/error.h"

namespace pith {

namespace fs = std::filesystem;
constexpr size_t index(std::integral auto number) { return static_cast<size_t>(number); }
constexpr double real(std::integral auto number) { return static_cast<double>(number); }

}
