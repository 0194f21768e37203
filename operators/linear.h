#pragma once
#include "core/parameter.h"

namespace pith {
// x (T, in), weight (out, in), bias (out) or null -> (T, out), in x's dtype, rounded once.
// Backward: dx = dy W; weight.grad += dy^T x and bias.grad += the sum of dy's rows in FP32, with no
// intermediate in the compute dtype. T may be 0.
Tensor linear(const Tensor& x, Parameter& weight, const Parameter* bias = nullptr);

// Result and backward in FP32 (FP64 for FP64): router logits.
Tensor linear_fp32(const Tensor& x, Parameter& weight, const Parameter* bias = nullptr);
}
