// The standard library, fmt and errors, precompiled for every room: files do not repeat them.
#pragma once
#include <bits/stdc++.h> // libstdc++, as LibTorch's wheel
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fmt/std.h>

namespace pith {
using std::array, std::deque, std::exchange, std::function, std::map, std::max, std::min,
    std::nullopt, std::optional, std::pair, std::set, std::shared_ptr, std::span, std::ssize,
    std::string, std::string_view, std::unique_ptr, std::vector;
namespace fs = std::filesystem;
namespace ranges = std::ranges;
constexpr size_t index(std::integral auto number) { return size_t(number); }
constexpr double real(std::integral auto number) { return double(number); }
}
#include "core/error.h"
