// SwiGLU activation (Shazeer 2020, arXiv 2002.05202).
#pragma once
#include "core/tensor.h"

namespace pith {

// gate_up (S, 2 I), gate block then up block -> (S, I): silu(gate) * up, in FP32, rounded once.
// Saves gate_up only; the backward recomputes the activation.
Tensor swiglu(const Tensor& gate_up);

// GPT-OSS' form of it: gate_up (S, 2 I), gates and ups alternating -> (S, I): g sigmoid(alpha g)
// (u + 1), where g is the gate, at most `limit`, and u the up, between -limit and limit; what is
// clamped has no gradient. In FP32, rounded once.
Tensor clamped_swiglu(const Tensor& gate_up, double alpha, double limit);

}
