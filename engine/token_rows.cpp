#include "engine/token_rows.h"

#include <nlohmann/json.hpp>

#include "engine/hf_folder.h"

namespace pith {
namespace {

using nlohmann::json;

int64_t read_id(const json& value, int64_t vocab_size, const std::string& place) {
  const bool valid = value.is_number_integer() && value >= 0 && value < vocab_size;
  PITH_CHECK(valid, "{}: {} is not an id below the vocabulary of {}", place, value.dump(),
             vocab_size);
  return value.get<int64_t>();
}

void append_document(Row& row, const json& document, const json* labels, int64_t vocab_size,
                     const std::string& place) {
  PITH_CHECK(document.is_array() && !document.empty(),
             "{}: a document must be a non-empty list of ids", place);
  PITH_CHECK(labels == nullptr || (labels->is_array() && labels->size() == document.size()),
             "{}: labels must have the shape of rows", place);
  row.document_begins.push_back(static_cast<int64_t>(row.tokens.size()));
  for (size_t i = 0; i < document.size(); ++i) {
    row.tokens.push_back(read_id(document[i], vocab_size, place));
    row.positions.push_back(static_cast<int64_t>(i));
    if (labels != nullptr)
      row.labels.push_back((*labels)[i] == -100 ? -100 : read_id((*labels)[i], vocab_size, place));
    else
      row.labels.push_back(i + 1 < document.size() ? read_id(document[i + 1], vocab_size, place)
                                                   : -100);
  }
}

}  // namespace

std::vector<Row> read_token_rows(const std::filesystem::path& path, int64_t vocab_size) {
  const json file = read_json(path);
  const std::string source = path.string();
  PITH_CHECK(file.is_array() || (file.is_object() && file.contains("rows")),
             "{}: expected a list of rows, or an object with \"rows\"", source);
  const json& rows = file.is_array() ? file : file["rows"];
  const json* labels = file.is_object() && file.contains("labels") ? &file["labels"] : nullptr;
  PITH_CHECK(rows.is_array() && !rows.empty(), "{}: no rows", source);
  PITH_CHECK(labels == nullptr || (labels->is_array() && labels->size() == rows.size()),
             "{}: labels must have the shape of rows", source);
  std::vector<Row> out(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    PITH_CHECK(rows[r].is_array() && !rows[r].empty(), "{}: row {} must be a list of documents",
               source, r);
    const json* row_labels = labels == nullptr ? nullptr : &(*labels)[r];
    PITH_CHECK(
        row_labels == nullptr || (row_labels->is_array() && row_labels->size() == rows[r].size()),
        "{}: labels must have the shape of rows (row {})", source, r);
    for (size_t d = 0; d < rows[r].size(); ++d) {
      append_document(out[r], rows[r][d], row_labels == nullptr ? nullptr : &(*row_labels)[d],
                      vocab_size, fmt::format("{}: row {}, document {}", source, r, d));
    }
  }
  return out;
}

}  // namespace pith
