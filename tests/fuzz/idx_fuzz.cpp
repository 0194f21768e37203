// A corpus index; its first four bytes state the size of the .bin file.
#include <cstring>
#include "engine/corpus.h"
#include "tests/fuzz/fuzz.h"

PITH_FUZZ(input) {
  if (input.size() < 4) return;
  uint32_t bin_bytes = 0;
  std::memcpy(&bin_bytes, input.data(), 4);
  const auto index = pith::parse_corpus_index(input.substr(4), bin_bytes, "fuzz");
  for (int64_t d = 0; d < index.num_documents; ++d) {
    const int64_t begin = index.begin(d), end = index.begin(d + 1);
    if (begin < 0 || begin > end || end > index.num_tokens) __builtin_trap();
  }
}
