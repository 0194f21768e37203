// Attention of rows that are split over context-parallel ranks: keys and values go round a ring.
#pragma once
#include <vector>

#include "core/comm.h"
#include "core/microbatch.h"
#include "core/parameter.h"

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

}  // namespace pith
