// SwiGLU activation (Shazeer 2020, arXiv 2002.05202).
#pragma once
#include "core/tensor.h"
#include "operators/kernels.h"

namespace pith {
// g sigmoid(alpha g) (u + plus) of gate g, at most `limit`, and up u, in -limit .. limit; what is
// clamped has no gradient. GPT-OSS: {1.702, 7, 1, true}.
using cuda::SwigluForm;

// gate_up (S, 2 I), gates then ups, or alternating -> (S, I), FP32, rounded once. Saves gate_up.
Tensor swiglu(const Tensor& gate_up, const SwigluForm& form = {});
// Not differentiable: that, and, dy (S, I) -> (S, 2 I), its gradient.
Tensor swiglu_forward(const Tensor& gate_up, const SwigluForm& form);
Tensor swiglu_backward(const Tensor& gate_up, const Tensor& dy, const SwigluForm& form);
}
