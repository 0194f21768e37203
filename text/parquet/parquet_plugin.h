// What libpith_parquet.so offers: a table of functions under the name pith_parquet_plugin.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace pith {

struct ParquetPlugin {
  void* (*open)(const char* path, const char* column, int64_t first_row, std::string& error);
  bool (*next)(void* handle, std::string& bytes, std::vector<int64_t>& sizes, std::string& error);
  void (*close)(void* handle);
};

}  // namespace pith
