#pragma once
#include "operators/attention.h"

namespace pith {
// Earlier positions of one layer, B sequences.
struct KvCache {
  Tensor k, v; // (Tk, Hkv, D), packed
  vector<int32_t> borders; // (B + 1) of the sequences
};

// Appends k and v (T, Hkv, D), packed as in `fresh` -> the span of their queries over all held.
AttentionSpan append_to_cache(
  KvCache& cache, const Tensor& k, const Tensor& v, const AttentionSpan& fresh);
}
