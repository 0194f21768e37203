// Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467).
#pragma once
#include "core/parameter.h"

namespace pith {

// x (..., D), weight (D) -> same shape and dtype: x / sqrt(mean(x^2) + eps) * weight over the last
// dimension, statistics and product in FP32, rounded once. Serves layer norms (T, H) and per-head
// norms (T, heads, D). Backward adds into weight.grad in FP32; x and 1 / sqrt(...) are saved. x may
// be a strided view of up to three dimensions with a contiguous last one (a slice of a fused
// projection).
Tensor rms_norm(const Tensor& x, Parameter& weight, double eps);

}  // namespace pith

#if PITH_CUDA
struct CUstream_st;
namespace pith::cuda {
// Row r of x starts at element (r / inner) * outer_stride + (r % inner) * inner_stride; everything
// else that has rows is contiguous.
struct NormRows {
  int64_t count, dim, inner, outer_stride, inner_stride;
};
void rms_norm_forward(const void* x, NormRows rows, const void* weight, double eps, void* y,
                      float* rstd, bool bf16, CUstream_st* stream);
// Rows of `partial` that the backward needs.
int64_t rms_norm_blocks(NormRows rows);
// dx (count, dim) unless null; dweight (dim) += unless null; partial (rms_norm_blocks, dim) is
// scratch.
void rms_norm_backward(const void* x, NormRows rows, const void* weight, const float* rstd,
                       const void* dy, void* dx, float* partial, float* dweight, bool bf16,
                       CUstream_st* stream);
}  // namespace pith::cuda
#endif
