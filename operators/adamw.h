// AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) in one pass over flat shards; their norm.
#pragma once
#include "core/tensor.h"

namespace pith {
struct AdamWStep {
  double learning_rate, beta1, beta2, epsilon, weight_decay; // decoupled: w -= lr * wd * w
  int64_t step; // 1 for the first update: bias correction
};

// One update, all tensors flat (n): master (decayed, updated) and grad (read) float32, exp_avg and
// exp_avg_sq float32 or both bfloat16 (rounded after use), value (compute dtype: the rounded
// master). grad_scale (scalar float32 on the device: the clip coefficient, no host wait) multiplies
// the gradient. 30 bytes move per parameter with BF16 values, 22 with BF16 moments. On the CPU all
// may be FP64.
void adamw_update(Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
  Tensor& value, const Tensor& grad_scale, const AdamWStep& step);

// Flat gradient -> scalar float64 on its device, the same bits every time.
Tensor sum_of_squares(const Tensor& grad);
}
