// SwiGLU activation (Shazeer 2020, arXiv 2002.05202).
#pragma once
#include "core/tensor.h"

namespace pith {

// gate_up (S, 2 I), gate block then up block -> (S, I): silu(gate) * up, in FP32, rounded once.
// Saves gate_up only.
Tensor swiglu(const Tensor& gate_up);

// GPT-OSS' form: gate_up (S, 2 I), alternating -> (S, I): g sigmoid(alpha g) (u + 1), gate g at
// most `limit`, up u in -limit .. limit; what is clamped has no gradient. FP32, rounded once.
Tensor clamped_swiglu(const Tensor& gate_up, double alpha, double limit);

}  // namespace pith
