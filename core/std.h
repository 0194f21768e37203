// The standard library, fmt and errors, precompiled for every room: files do not repeat them.
#pragma once
#include <bits/stdc++.h> // libstdc++, as LibTorch's wheel
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fmt/std.h>

namespace pith {
using std::array, std::deque, std::exception, std::exchange, std::from_chars, std::function,
  std::getline, std::ifstream, std::initializer_list, std::isfinite, std::lock_guard,
  std::make_shared, std::make_unique, std::map, std::max, std::min, std::nullopt,
  std::numeric_limits, std::optional, std::pair, std::reduce, std::regex, std::same_as, std::set,
  std::shared_ptr, std::span, std::sqrt, std::ssize, std::string, std::string_view, std::thread,
  std::to_string, std::unique_ptr, std::unordered_map, std::vector;
namespace chrono = std::chrono;
namespace fs = std::filesystem;
namespace ranges = std::ranges;
constexpr size_t index(std::integral auto number) { return size_t(number); }
constexpr double real(std::integral auto number) { return double(number); }
}
#include "core/error.h"
