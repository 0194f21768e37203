// Integer arrays in numpy's .npy format (version 1 to 3), as views of bytes.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace pith {

struct NumpyArray {
  const char* data = nullptr;
  int64_t size = 0, width = 0;  // elements, bytes of one
  bool is_signed = false;
  int64_t operator[](int64_t i) const;  // an Error for uint64 values past 2^63
};

// The one-dimensional array at the beginning of `bytes`, which then begins behind it. Little-endian
// integers of 1, 2, 4 or 8 bytes; anything else is an Error that names `source`.
NumpyArray read_numpy(std::string_view& bytes, const std::string& source);

}  // namespace pith
