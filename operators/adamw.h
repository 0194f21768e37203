// AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) in one pass over flat shards, and the clip
// norm.
#pragma once
#include "core/tensor.h"

namespace pith {

struct AdamWStep {
  double learning_rate, beta1, beta2, epsilon, weight_decay;  // decoupled: w -= lr * wd * w
  int64_t step;  // 1 for the first update: bias correction
};

// One update of n elements, all tensors flat (n): master float32 (decayed and updated), exp_avg and
// exp_avg_sq float32, grad float32 (read only), value (compute dtype: receives the rounded master).
// The gradient is multiplied by `grad_scale` (scalar float32 tensor on the device: the clip
// coefficient; no host wait). 30 bytes move per parameter with BF16 values. FP64 tensors are taken
// on the CPU (all of them FP64).
void adamw_update(Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
                  Tensor& value, const Tensor& grad_scale, const AdamWStep& step);

// Sum of squares of a flat gradient, accumulated in FP64, same bits every time -> scalar float64 on
// the device.
Tensor sum_of_squares(const Tensor& grad);

}  // namespace pith

#if PITH_CUDA
struct CUstream_st;
namespace pith::cuda {
// The step's scalars, computed on the host in FP64.
struct AdamWScalars {
  float decay;  // lr * weight_decay
  float beta1, beta2;
  float rest1, rest2;  // 1 - beta1, 1 - beta2
  float epsilon;
  float rate;                 // lr / (1 - beta1^step)
  float inverse_correction2;  // 1 / sqrt(1 - beta2^step)
};
// All (n); value float32, or bfloat16 where bf16.
void adamw_update(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, void* value,
                  int64_t n, const float* grad_scale, AdamWScalars scalars, bool bf16,
                  CUstream_st* stream);
// partial (sum_of_squares_blocks()) float64 is scratch; result: one float64.
int64_t sum_of_squares_blocks();
void sum_of_squares(const float* x, int64_t n, double* partial, double* result,
                    CUstream_st* stream);
}  // namespace pith::cuda
#endif
