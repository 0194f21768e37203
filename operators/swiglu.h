// SwiGLU activation (Shazeer 2020, arXiv 2002.05202).
#pragma once
#include "core/tensor.h"

namespace pith {
// gate_up (S, 2 I), gates then ups -> (S, I): silu(gate) * up, FP32, rounded once. Saves gate_up.
Tensor swiglu(const Tensor& gate_up);

// GPT-OSS' form: gate_up (S, 2 I), alternating -> (S, I): g sigmoid(alpha g) (u + 1), gate g at
// most `limit`, up u in -limit .. limit; what is clamped has no gradient. FP32, rounded once.
Tensor clamped_swiglu(const Tensor& gate_up, double alpha, double limit);
}
