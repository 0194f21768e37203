// SwiGLU activation (Shazeer 2020, arXiv 2002.05202).
#pragma once
#include "core/tensor.h"

namespace pith {

// gate_up (S, 2 I), gate block then up block -> (S, I): silu(gate) * up, in FP32, rounded once.
// Saves gate_up only; the backward recomputes the activation.
Tensor swiglu(const Tensor& gate_up);

}  // namespace pith

#if PITH_CUDA
struct CUstream_st;
namespace pith::cuda {
// gate_up (rows, 2 width) -> y (rows, width).
void swiglu_forward(const void* gate_up, void* y, int64_t rows, int64_t width, bool bf16,
                    CUstream_st* stream);
// gate_up (rows, 2 width), dy (rows, width) -> dgate_up (rows, 2 width).
void swiglu_backward(const void* gate_up, const void* dy, void* dgate_up, int64_t rows,
                     int64_t width, bool bf16, CUstream_st* stream);
}  // namespace pith::cuda
#endif
