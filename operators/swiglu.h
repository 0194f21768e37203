// SwiGLU activation (Shazeer 2020, arXiv 2002.05202).
#pragma once
#include "core/tensor.h"

namespace pith {

// gate_up (S, 2 I), gate block then up block -> (S, I): silu(gate) * up, in FP32, rounded once.
// Saves gate_up only; the backward recomputes the activation.
Tensor swiglu(const Tensor& gate_up);

}  // namespace pith
