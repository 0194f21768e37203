// Attention of rows that are split over context-parallel ranks: keys and values go round a ring,
// or, in a window, from those who hold them.
#pragma once
#include <vector>

#include "core/comm.h"
#include "operators/attention.h"

namespace pith {

// Ring attention (Liu et al., arXiv 2310.01889) over zigzag chunks. q (T, Hq, D), k (T, Hkv, D), v
// (T, Hkv, Dv): the local tokens of a micro-batch that was split over `context`, `ring` its steps
// -> (T, Hq, Dv). `sinks` as in attention(), counted once all keys are. The same values as
// attention() on the unsplit rows. Partial results are merged in FP32 (FP64 for FP64). Collective:
// every member calls it, and the backward pass, in the same order. `ring` and `context` must
// outlive the backward pass.
Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v,
    const std::vector<RingStep>& ring, double scale, const Comm& context,
    const Parameter* sinks = nullptr);

// The same with options.window, of a micro-batch that was split for it, without a ring: keys and
// values that the window reaches come from the ranks that hold them; their gradients go back and
// are added in one order. `halo` and `context` must outlive the backward pass.
Tensor window_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Halo& halo,
    double scale, const AttentionOptions& options, const Comm& context);

}  // namespace pith
