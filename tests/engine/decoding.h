// Generation with a cache against whole sequences, for any family. Provides check_decoding.
#pragma once
#include <gtest/gtest.h>
#include "tests/engine/tiny_model.h"

namespace pith {
// One token after another through the cache gives the logits of the whole sequences.
template <class Model> void check_decoding(const nlohmann::json& config) {
  TinyModelOf<Model> tiny(config);
  auto pipeline = tiny.pipeline();
  const int64_t rows = 2, length = 12, prompt = 7, vocab = 61;
  std::vector<Row> whole = ragged_rows(rows, length, vocab);
  for (Row& row: whole) {
    row.document_begins = {0};
    std::iota(row.positions.begin(), row.positions.end(), 0);
  }
  const auto logits = [&](int64_t begin, int64_t end, std::span<LayerCache> caches) {
    std::vector<Row> part = whole;
    for (Row& row: part) {
      const auto take = [&](std::vector<int64_t>& all) {
        all = std::vector<int64_t>(all.begin() + begin, all.begin() + end);
      };
      take(row.tokens), take(row.labels), take(row.positions);
    }
    return pipeline.forward_only(cut(part, rows), AllLogits(), caches)
      .per_token[0]
      .view({rows, end - begin, vocab});
  };
  const Tensor expected = logits(0, length, {});
  std::vector<LayerCache> caches(static_cast<size_t>(tiny.model.config().num_layers));
  EXPECT_LT(relative_error(logits(0, prompt, caches), expected.narrow(1, 0, prompt)), 1e-5);
  for (int64_t t = prompt; t < length; ++t)
    EXPECT_LT(relative_error(logits(t, t + 1, caches), expected.narrow(1, t, 1)), 1e-5) << t;
}

} // namespace pith
