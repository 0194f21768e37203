// One text column of a Parquet file, through an optional plugin (text/parquet/parquet_plugin.cpp)
// that `./pith setup --parquet` makes possible; the program itself does not link libparquet.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace pith {

class ParquetReader {
 public:
  // Reads from row `first_row` on. `column` may be "a.b". An Error names file and column, or says
  // how to install the plugin.
  ParquetReader(const std::string& path, const std::string& column, int64_t first_row);
  ~ParquetReader();
  ParquetReader(const ParquetReader&) = delete;
  ParquetReader& operator=(const ParquetReader&) = delete;
  // The next rows, one after the other in `bytes`; a size of -1 is a null. False at the end.
  bool next(std::string& bytes, std::vector<int64_t>& sizes);

 private:
  void* handle_ = nullptr;
  std::string path_;
};

}  // namespace pith
