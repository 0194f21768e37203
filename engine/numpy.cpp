#include "engine/numpy.h"

#include <cstring>
#include <regex>

#include "core/error.h"

namespace pith {

int64_t NumpyArray::operator[](int64_t i) const {
  uint64_t value = 0;
  std::memcpy(&value, data + i * width, static_cast<size_t>(width));
  const int unused = 64 - 8 * static_cast<int>(width);
  if (is_signed) return static_cast<int64_t>(value << unused) >> unused;
  PITH_CHECK(value <= INT64_MAX, "element {} is {}, past 2^63", i, value);
  return static_cast<int64_t>(value);
}

NumpyArray read_numpy(std::string_view& bytes, const std::string& source) {
  const auto byte = [&](size_t i) { return static_cast<uint64_t>(static_cast<uint8_t>(bytes[i])); };
  PITH_CHECK(bytes.size() >= 12 && bytes.starts_with("\x93NUMPY"), "{}: not a numpy array", source);
  const size_t prefix = byte(6) == 1 ? 10 : 12;
  const uint64_t length =
      byte(8) | byte(9) << 8 | (prefix == 12 ? byte(10) << 16 | byte(11) << 24 : 0);
  PITH_CHECK(byte(6) <= 3 && length <= 4096 && prefix + length <= bytes.size(),
      "{}: the header of a numpy array is damaged", source);
  const std::string header(bytes.substr(prefix, length));
  static const std::regex type(R"('descr': *'[<|]([iu])([1248])')"),
      shape(R"('shape': *\(([0-9]{1,18}),\))");
  std::smatch kind, count;
  PITH_CHECK(std::regex_search(header, kind, type) && std::regex_search(header, count, shape),
      "{}: {} is not a one-dimensional array of integers", source, header);
  NumpyArray array{
      bytes.data() + prefix + length, std::stoll(count[1]), std::stoll(kind[2]), kind[1] == "i"};
  bytes.remove_prefix(prefix + length);
  PITH_CHECK(static_cast<uint64_t>(array.size) <= bytes.size() / static_cast<uint64_t>(array.width),
      "{}: {} elements of {} bytes do not fit the {} bytes that follow", source, array.size,
      array.width, bytes.size());
  bytes.remove_prefix(static_cast<size_t>(array.size * array.width));
  return array;
}

}  // namespace pith
