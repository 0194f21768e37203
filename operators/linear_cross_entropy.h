// The language-model head and its loss, in chunks of tokens: all logits never exist at once.
#pragma once
#include "core/parameter.h"

namespace pith {

struct CrossEntropy {
  Tensor loss;      // scalar float32: scale * loss_sum; a root of the backward
  Tensor loss_sum;  // scalar float32: sum over trained tokens of -log p(label), no gradient
  Tensor logprobs;  // (T) float32: log p(label), 0 where the label is -100, no gradient
};

// hidden (T, H), weight (V, H), labels (T) int64 in [0, V) or -100. Softmax and loss are FP32, and
// logits too but for BF16 on CUDA, where they are rounded once to BF16 as other trainers do. In
// grad mode the gradient is made during the forward pass (three matrix products in all):
// weight.grad += scale * dW now, and the backward hands out scale * dhidden; `loss` must therefore
// be a root of the backward with gradient 1 (checked on the CPU). Without grad mode no buffer is
// touched. A label outside [0, V) other than -100 throws on the CPU; on CUDA its log-probability
// becomes NaN. FP64 inputs (CPU) make everything FP64. chunk_tokens: rows whose logits exist at a
// time; 0 takes what the memory budget of the device allows.
CrossEntropy linear_cross_entropy(const Tensor& hidden, Parameter& weight, const Tensor& labels,
    double scale, int64_t chunk_tokens = 0);

// hidden (T, H), weight (V, H) -> (T, V) float32 logits, no gradient: for generation and traces.
Tensor head_logits(const Tensor& hidden, const Parameter& weight);

}
