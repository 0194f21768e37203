// The only file that knows libparquet: one column of text, a few rows at a time.
#include "core/std.h"

#include <parquet/api/reader.h>

#include "text/corpus_reader.h"

namespace {

constexpr int64_t kRows = 16;         // read at once
constexpr size_t kBytes = 512 << 10;  // handed out at once, about

struct Column {
  std::unique_ptr<parquet::ParquetFileReader> file;
  std::shared_ptr<parquet::ColumnReader> values;  // of the row group before `group`
  int index = 0, group = 0;

  bool next_group() {
    if (group == file->metadata()->num_row_groups()) return false;
    values = file->RowGroup(group++)->Column(index);
    return true;
  }
};

void* open(const char* path, const char* name, int64_t first_row, std::string& error) try {
  auto column = std::make_unique<Column>();
  parquet::ReaderProperties properties;
  properties.enable_buffered_stream();  // pages, not whole row groups
  column->file = parquet::ParquetFileReader::OpenFile(path, false, properties);
  const parquet::FileMetaData& about = *column->file->metadata();
  column->index = about.schema()->ColumnIndex(std::string(name));
  if (column->index < 0) throw std::runtime_error("no column \"" + std::string(name) + "\"");
  const parquet::ColumnDescriptor& kind = *about.schema()->Column(column->index);
  if (kind.physical_type() != parquet::Type::BYTE_ARRAY || kind.max_repetition_level() > 0)
    throw std::runtime_error("column \"" + std::string(name) + "\" is not text");
  while (column->group < about.num_row_groups() &&
      first_row >= about.RowGroup(column->group)->num_rows())
    first_row -= about.RowGroup(column->group++)->num_rows();
  if (first_row > 0 && column->next_group())
    static_cast<parquet::ByteArrayReader&>(*column->values).Skip(first_row);
  return column.release();
} catch (const std::exception& failure) {
  error = failure.what();
  return nullptr;
}

void next(void* handle, std::vector<std::optional<std::string>>& texts, std::string& error) try {
  auto& column = *static_cast<Column*>(handle);
  for (size_t bytes = 0; bytes < kBytes;) {
    if (!column.values || !column.values->HasNext()) {
      if (!column.next_group()) break;
      continue;
    }
    auto& reader = static_cast<parquet::ByteArrayReader&>(*column.values);
    const int16_t present = reader.descr()->max_definition_level();
    parquet::ByteArray values[kRows];
    int16_t levels[kRows];
    int64_t count = 0;
    const int64_t rows = reader.ReadBatch(kRows, levels, nullptr, values, &count);
    for (int64_t row = 0, value = 0; row < rows; ++row) {
      auto& text = texts.emplace_back();
      if (present > 0 && levels[row] < present) continue;
      text.emplace(reinterpret_cast<const char*>(values[value].ptr), values[value].len);
      bytes += values[value++].len;
    }
  }
} catch (const std::exception& failure) { error = failure.what(); }

void close(void* handle) { delete static_cast<Column*>(handle); }

}  // namespace

extern "C" __attribute__((visibility("default"))) const pith::ParquetPlugin pith_parquet_plugin;
const pith::ParquetPlugin pith_parquet_plugin{open, next, close};
