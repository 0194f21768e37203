// Matrix products with an FP32 result from BF16 operands: logits and weight gradients.
#pragma once
#include "core/tensor.h"

namespace pith {

// Dtype that sums and logits of `dtype` tensors are kept in: FP64 for FP64, otherwise FP32.
inline at::ScalarType wide_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// out (M, N) in wide_dtype = a (M, K) b (K, N), without rounding to the compute dtype in between.
void mm_wide_out(Tensor& out, const Tensor& a, const Tensor& b);

// gradient (out, in) in wide_dtype += alpha * dy^T x, with dy (T, out) and x (T, in); T may be 0.
void add_weight_gradient(const Tensor& gradient, const Tensor& dy, const Tensor& x,
                         double alpha = 1);

}  // namespace pith
