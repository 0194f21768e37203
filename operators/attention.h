// Causal grouped-query attention over packed documents of unequal length.
#pragma once
#include "core/tensor.h"

namespace pith {

// Borders of the documents in a packed (T, ...) tensor. Document d has queries cu_q[d] .. cu_q[d+1]
// and keys cu_k[d] .. cu_k[d+1]; in training both are the same, while decoding there are more keys
// than queries.
struct AttentionSpan {
  Tensor cu_q, cu_k;             // (D + 1) int32 on the compute device
  Tensor cu_q_host, cu_k_host;   // the same on the CPU
  int64_t max_q = 0, max_k = 0;  // longest document in each
};

// q (Tq, Hq, D), k and v (Tk, Hkv, D), Hkv divides Hq -> (Tq, Hq, D). Query head h reads key head
// h / (Hq / Hkv). Causal, aligned at the documents' ends: query i of n sees keys 0 .. i + (keys -
// n). A document has at least as many keys as queries; both may be 0. Softmax in FP32 (FP64 for
// FP64 inputs, CPU). Backward recomputes from the saved log-sum-exp. Inputs may be strided views
// with a contiguous last dimension. The CUDA backward gives the same bits every time only while
// at::globalContext().deterministicAlgorithms() is set; the path then avoids cuDNN.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionSpan& span,
                 double scale);

// Name of the kernel that attention() takes for such inputs, for the log: the one place that
// chooses.
const char* attention_path(const Tensor& q, const AttentionSpan& span);

}  // namespace pith
