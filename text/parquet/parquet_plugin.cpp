// The only file that knows libparquet: one column of text, a few rows at a time.
#include <parquet/api/reader.h>
#include "core/std.h"
#include "text/corpus_reader.h"

namespace {
constexpr int64_t kRows = 16; // read at once
constexpr size_t kBytes = 512 << 10; // handed out at once, about

struct Column {
  std::unique_ptr<parquet::ParquetFileReader> file;
  std::shared_ptr<parquet::ColumnReader> values; // of the row group before `group`
  int index = 0, group = 0;

  bool next_group() {
    if (group == file->metadata()->num_row_groups()) return false;
    values = file->RowGroup(group++)->Column(index);
    return true;
  }

  std::vector<std::optional<std::string>> next() {
    std::vector<std::optional<std::string>> texts;
    for (size_t bytes = 0; bytes < kBytes;) {
      if (!values || !values->HasNext()) {
        if (!next_group()) break;
        continue;
      }
      auto& reader = static_cast<parquet::ByteArrayReader&>(*values);
      const int16_t present = reader.descr()->max_definition_level();
      parquet::ByteArray read[kRows];
      int16_t levels[kRows];
      int64_t count = 0;
      const int64_t rows = reader.ReadBatch(kRows, levels, nullptr, read, &count);
      for (int64_t row = 0, value = 0; row < rows; ++row) {
        auto& text = texts.emplace_back();
        if (present > 0 && levels[row] < present) continue;
        text.emplace(reinterpret_cast<const char*>(read[value].ptr), read[value].len);
        bytes += read[value++].len;
      }
    }
    return texts;
  }
};

pith::TableRows open(const std::string& path, const std::string& name, int64_t row) {
  const auto column = std::make_shared<Column>();
  parquet::ReaderProperties properties;
  properties.enable_buffered_stream(); // pages, not whole row groups
  column->file = parquet::ParquetFileReader::OpenFile(path, false, properties);
  const parquet::FileMetaData& about = *column->file->metadata();
  column->index = about.schema()->ColumnIndex(name);
  if (column->index < 0) throw std::runtime_error("no column \"" + name + "\"");
  const parquet::ColumnDescriptor& kind = *about.schema()->Column(column->index);
  if (kind.physical_type() != parquet::Type::BYTE_ARRAY || kind.max_repetition_level() > 0)
    throw std::runtime_error("column \"" + name + "\" is not text");
  while (column->group < about.num_row_groups() && row >= about.RowGroup(column->group)->num_rows())
    row -= about.RowGroup(column->group++)->num_rows();
  if (row > 0 && column->next_group())
    static_cast<parquet::ByteArrayReader&>(*column->values).Skip(row);
  return [column] { return column->next(); };
}
}

extern "C" __attribute__((visibility("default"))) const pith::OpenParquet pith_open_parquet;
const pith::OpenParquet pith_open_parquet = open;
