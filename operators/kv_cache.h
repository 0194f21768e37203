// Keys and values of earlier positions, kept for decoding.
#pragma once
#include "operators/attention.h"

namespace pith {

// One layer's cache of B sequences.
struct KvCache {
  Tensor k, v;                   // (Tk, Hkv, D), all positions of all sequences, packed
  std::vector<int32_t> borders;  // (B + 1) of the sequences
};

// Appends new k and v (T, Hkv, D), packed by sequence as in `fresh` -> the span of their queries
// over all that the cache then holds.
AttentionSpan append_to_cache(
    KvCache& cache, const Tensor& k, const Tensor& v, const AttentionSpan& fresh);

}
