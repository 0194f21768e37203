#include "engine/token_rows.h"

#include <nlohmann/json.hpp>

#include "engine/file_io.h"

namespace pith {
namespace {

using nlohmann::json;

int64_t read_id(const json& value, int64_t vocab_size, const std::string& place) {
  const bool valid = value.is_number_integer() && value >= 0 && value < vocab_size;
  PITH_CHECK(
      valid, "{}: {} is not an id below the vocabulary of {}", place, value.dump(), vocab_size);
  return value.get<int64_t>();
}

void check_list(const json& list, const json* labels, const std::string& place) {
  PITH_CHECK(list.is_array() && !list.empty(), "{}: must be a list that is not empty", place);
  PITH_CHECK(!labels || (labels->is_array() && labels->size() == list.size()),
      "{}: labels must have the shape of rows", place);
}

}  // namespace

std::vector<Row> read_token_rows(const std::filesystem::path& path, int64_t vocab_size) {
  const json file = read_json(path);
  const std::string source = path.string();
  PITH_CHECK(file.is_array() || file.contains("rows"),
      "{}: expected a list of rows, or an object with \"rows\"", source);
  const json& rows = file.is_array() ? file : file["rows"];
  const json* labels = file.contains("labels") ? &file["labels"] : nullptr;
  const auto at = [](const json* list, size_t i) { return list ? &(*list)[i] : nullptr; };
  check_list(rows, labels, source);
  std::vector<Row> out(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    Row& row = out[r];
    check_list(rows[r], at(labels, r), fmt::format("{}: row {}", source, r));
    for (size_t d = 0; d < rows[r].size(); ++d) {
      const json& document = rows[r][d];
      const json* own = at(at(labels, r), d);
      const std::string place = fmt::format("{}: row {}, document {}", source, r, d);
      check_list(document, own, place);
      row.document_begins.push_back(static_cast<int64_t>(row.tokens.size()));
      for (size_t i = 0; i < document.size(); ++i) {
        row.tokens.push_back(read_id(document[i], vocab_size, place));
        row.positions.push_back(static_cast<int64_t>(i));
        const json next = i + 1 < document.size() ? document[i + 1] : json(-100);
        const json& label = own ? (*own)[i] : next;
        row.labels.push_back(label == -100 ? -100 : read_id(label, vocab_size, place));
      }
    }
  }
  return out;
}

}  // namespace pith
