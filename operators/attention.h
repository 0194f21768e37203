// Causal grouped-query attention over packed documents of unequal length.
#pragma once
#include "core/microbatch.h"
#include "core/parameter.h"

namespace pith {
struct AttentionOptions {
  int64_t window = 0; // keys that a query sees, its own the last; 0: all before it
  // (Hq): a logit of each head in the softmax, without a value; its gradient is added.
  const Parameter* sinks = nullptr;
};

// q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), Hkv divides Hq -> (Tq, Hq, Dv). Query head h
// reads key head h / (Hq / Hkv). Causal, aligned at documents' ends: query i of n sees keys 0 .. i
// + (keys - n). A document has at least as many keys as queries; both may be 0. Softmax in FP32
// (FP64 for FP64, CPU). Backward recomputes from the saved log-sum-exp. Inputs may be strided
// views, last dimension contiguous. The CUDA backward gives the same bits only under
// at::globalContext().deterministicAlgorithms(); the path then avoids cuDNN.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionSpan& span,
  double scale, const AttentionOptions& options = {});

// Throw unless q, k and v, or the borders of documents, fit attention().
void check_attention(const Tensor& q, const Tensor& k, const Tensor& v);
void check_borders(const AttentionSpan& span, int64_t rows_q, int64_t rows_k);

// From a part of the keys. Parts are merged by weights exp(lse).
struct AttentionPart {
  Tensor out; // (Tq, Hq, Dv)
  Tensor lse; // (Tq, Hq, 1) FP32 or wider: log sum exp(scale * q k)
};

// No autograd: causal, as many queries as keys a document, or all see all; none lacks only one.
AttentionPart attention_part(const Tensor& q, const Tensor& k, const Tensor& v,
  const AttentionSpan& span, bool causal, double scale);
// The part when the softmax counts the sinks s (Hq), if any, too: lse' = log(exp(lse) + exp(s)),
// out' = out exp(lse - lse'). They replace out and lse in a backward pass; the sinks' gradient is
// -sum over rows of exp(s - lse') <dout, out'>.
AttentionPart with_sinks(const AttentionPart& part, const Parameter* sinks);
void add_sink_gradient(const Parameter* sinks, const Tensor& dout, const AttentionPart& whole);

using AttentionGradients = array<Tensor, 3>; // of q, k and v
// Through these keys. `whole`: out (q's dtype) and lse over all keys that are seen.
AttentionGradients attention_part_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
  const Tensor& v, const AttentionPart& whole, const AttentionSpan& span, bool causal,
  double scale);

// The kernel that attention() takes, for the log.
const char* attention_path(const Tensor& q, const Tensor& v, const AttentionSpan& span);
}
