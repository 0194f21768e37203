// Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467).
#pragma once
#include "core/parameter.h"

namespace pith {
// x (..., D), weight (D) -> same shape and dtype: x / sqrt(mean(x^2) + eps) * weight over the last
// dimension, in FP32, rounded once. Backward adds into weight.grad in FP32; x and 1 / sqrt(...) are
// saved. x may be a strided view of up to three dimensions, the last contiguous. `zero_centred`:
// the factor is 1 + weight, in FP32 (Qwen3.5).
Tensor rms_norm(const Tensor& x, Parameter& weight, double eps, bool zero_centred = false);
}
