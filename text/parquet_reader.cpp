#include "text/parquet_reader.h"

#include <dlfcn.h>

#include "core/error.h"
#include "text/parquet/parquet_plugin.h"

namespace pith {
namespace {

const ParquetPlugin& plugin() {
  static void* library = ::dlopen("libpith_parquet.so", RTLD_NOW | RTLD_LOCAL);
  static void* symbol = library ? ::dlsym(library, "pith_parquet_plugin") : nullptr;
  if (!symbol) {
    const char* why = ::dlerror();
    PITH_FAIL_HINT("run ./pith setup --parquet, then ./pith build",
                   "Parquet files cannot be read: {}", why ? why : "the plugin is damaged");
  }
  return *static_cast<const ParquetPlugin*>(symbol);
}

}  // namespace

ParquetReader::ParquetReader(const std::string& path, const std::string& column, int64_t first_row)
    : path_(path) {
  std::string error;
  handle_ = plugin().open(path.c_str(), column.c_str(), first_row, error);
  PITH_CHECK(handle_, "{}: {}", path, error);
}

ParquetReader::~ParquetReader() { plugin().close(handle_); }

bool ParquetReader::next(std::string& bytes, std::vector<int64_t>& sizes) {
  std::string error;
  const bool found = plugin().next(handle_, bytes, sizes, error);
  PITH_CHECK(error.empty(), "{}: {}", path_, error);
  return found;
}

}  // namespace pith
