// Causal grouped-query attention over packed documents of unequal length.
#pragma once
#include "core/microbatch.h"
#include "core/parameter.h"

namespace pith {

// What a family's attention has besides: a window and sinks (GPT-OSS).
struct AttentionOptions {
  int64_t window = 0;  // keys that a query sees, its own the last of them; 0: all before it
  // (Hq): a logit of each head that the softmax counts, without a value; its gradient is added.
  const Parameter* sinks = nullptr;
};

// q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), Hkv divides Hq -> (Tq, Hq, Dv). Query head h
// reads key head h / (Hq / Hkv). Causal, aligned at the documents' ends: query i of n sees keys 0
// .. i + (keys - n). A document has at least as many keys as queries; both may be 0. Softmax in
// FP32 (FP64 for FP64 inputs, CPU). Backward recomputes from the saved log-sum-exp. Inputs may be
// strided views with a contiguous last dimension. The CUDA backward gives the same bits every time
// only while at::globalContext().deterministicAlgorithms() is set; the path then avoids cuDNN.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionSpan& span,
    double scale, const AttentionOptions& options = {});

// Throws unless q, k and v, or the borders of documents, are as attention() takes them.
void check_attention(const Tensor& q, const Tensor& k, const Tensor& v);
void check_borders(const AttentionSpan& span, int64_t rows_q, int64_t rows_k);

// What queries get from a part of their keys. Parts are merged by weights exp(lse).
struct AttentionPart {
  Tensor out;  // (Tq, Hq, Dv)
  Tensor lse;  // (Tq, Hq, 1) FP32 or wider: log of the sum of exp(scale * q k)
};

// Attention without autograd, for those with a backward pass of their own: causal with as many
// queries as keys in each document, or every query sees every key. No document lacks only one.
AttentionPart attention_part(const Tensor& q, const Tensor& k, const Tensor& v,
    const AttentionSpan& span, bool causal, double scale);
// What is left of it when the softmax counts the sinks s (Hq), if any, too: lse' = log(exp(lse) +
// exp(s)), out' = out exp(lse - lse'). In a backward pass these take the place of out and lse, and
// the sinks' gradient is -sum over rows of exp(s - lse') <dout, out'>.
AttentionPart with_sinks(const AttentionPart& part, const Parameter* sinks);
void add_sink_gradient(const Parameter* sinks, const Tensor& dout, const AttentionPart& whole);

using AttentionGradients = std::array<Tensor, 3>;  // of q, k and v
// The gradients through these keys. `whole`: out (q's dtype) and lse over all keys that are seen.
AttentionGradients attention_part_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
    const Tensor& v, const AttentionPart& whole, const AttentionSpan& span, bool causal,
    double scale);

// Name of the kernel that attention() takes for such inputs, for the log.
const char* attention_path(const Tensor& q, const Tensor& v, const AttentionSpan& span);

}
