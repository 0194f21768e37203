// Embedding lookup.
#pragma once
#include "core/parameter.h"

namespace pith {

// tokens (T) int64 in [0, V), weight (V, H) -> (T, H) in the weight's dtype. Backward adds the sum
// of a token's rows into weight.grad, in FP32 and in the order of positions (the same bits every
// time).
Tensor embedding(const Tensor& tokens, Parameter& weight);

}  // namespace pith

#if PITH_CUDA
struct CUstream_st;
namespace pith::cuda {
// grad (V, H) float32 += the rows of dy (T, H) summed by token; `sorted` (T) tokens ascending,
// `position` (T) where each came from.
void add_rows_by_token(const int64_t* sorted, const int64_t* position, const void* dy, float* grad,
                       int64_t num_tokens, int64_t hidden, bool bf16, CUstream_st* stream);
}  // namespace pith::cuda
#endif
