// Attention in a window where rows are split over context-parallel ranks: no ring, one exchange.
#pragma once
#include "core/comm.h"
#include "operators/attention.h"

namespace pith {

// q (T, Hq, D), k (T, Hkv, D), v (T, Hkv, Dv): the local tokens of a micro-batch that was split
// over `context` with this halo -> (T, Hq, Dv): the same as attention() on the unsplit rows, with
// options.window = halo.window. Keys and values before a chunk are fetched from the ranks that hold
// them, their gradients sent back and added in one order. Collective: every member calls it, and
// the backward pass, in the same order. `halo` and `context` must outlive the backward pass.
Tensor window_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Halo& halo,
    double scale, const AttentionOptions& options, const Comm& context);

}  // namespace pith
