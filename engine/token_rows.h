// Rows of token ids from a JSON file: the input of `pithtrain trace`.
#pragma once
#include <filesystem>

#include "engine/batches.h"

namespace pith {

// A list of rows, each a list of documents, each a list of ids in [0, vocab_size); or an object
// with "rows" and "labels" of the same shape (-100 = not trained). Without labels each token's
// label is the next one of its document and the last one's -100. Throws an Error that names the
// file and the place.
std::vector<Row> read_token_rows(const std::filesystem::path& path, int64_t vocab_size);

}  // namespace pith
