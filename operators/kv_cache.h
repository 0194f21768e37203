// Keys and values of earlier positions, kept for decoding.
#pragma once
#include "operators/attention.h"

namespace pith {

// One layer's cache of B sequences. Grows by doubling.
struct KvCache {
  Tensor k, v;                   // (B, capacity, Hkv, D)
  std::vector<int64_t> lengths;  // (B) positions filled
};

struct CachedKeys {
  Tensor k, v;         // (Tk, Hkv, D), all positions of all sequences, packed
  AttentionSpan span;  // queries: the new positions; keys: all of them
};

// Appends new k and v (T, Hkv, D), packed by sequence as in `fresh`; all there is to attend to.
CachedKeys append_to_cache(
    KvCache& cache, const Tensor& k, const Tensor& v, const AttentionSpan& fresh);

}  // namespace pith
