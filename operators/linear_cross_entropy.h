// Head and loss in chunks of tokens: all logits never exist at once.
#pragma once
#include "core/parameter.h"

namespace pith {
struct CrossEntropy {
  Tensor loss; // scalar float32: scale * loss_sum; a root of the backward
  Tensor loss_sum; // scalar float32: of -log p(label) over trained tokens, no gradient
  Tensor logprobs; // (T) float32: log p(label), 0 for label -100, no gradient
};

// hidden (T, H), weight (V, H), labels (T) int64 in [0, V) or -100. FP32 softmax, loss and logits,
// but logits of BF16 on CUDA are rounded once to BF16, as other trainers do; FP64 for FP64 (CPU).
// In grad mode the forward pass makes the gradient (three matrix products in all): weight.grad +=
// scale * dW now, and the backward hands out scale * dhidden: `loss` must be a root of the backward
// with gradient 1 (checked on the CPU). Without grad mode no buffer is touched. Another label
// throws on the CPU; on CUDA its log-probability is NaN. chunk_tokens: rows of logits at a time; 0:
// what the device's memory budget allows.
CrossEntropy linear_cross_entropy(const Tensor& hidden, Parameter& weight, const Tensor& labels,
  double scale, int64_t chunk_tokens = 0);

// hidden (T, H), weight (V, H) -> (T, V) float32, no gradient: for generation and traces.
Tensor head_logits(const Tensor& hidden, const Parameter& weight);
}
