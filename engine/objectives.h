// Objectives, template parameters of the pipeline: what the last stage computes of hidden states.
#pragma once
#include "core/microbatch.h"
#include "core/parameter.h"
#include "operators/linear_cross_entropy.h"

namespace pith {
struct ObjectiveResult {
  Tensor loss; // root of the backward pass, scaled by 1 / global trained tokens; or undefined
  Tensor loss_sum; // scalar float32: sum of the token losses of this micro-batch, no gradient
  Tensor per_token; // what the objective reports for each token (or row), no gradient
};

// Cross-entropy of the next token. per_token: log-probability of the label (T), 0 where it is -100.
struct NextTokenLoss {
  ObjectiveResult operator()(const Tensor& hidden, Parameter& head, const MicroBatch& batch) const {
    // A batch without a trained token has loss 0 and no gradient, not 0 / 0.
    const auto count = real(batch.global_trained_tokens);
    const CrossEntropy result =
      linear_cross_entropy(hidden, head, batch.labels, count > 0 ? 1 / count : 0);
    return {result.loss, result.loss_sum, result.logprobs};
  }
};

// Logits (float32) of the last token of each document, for sampling: per_token (D, V).
struct LastTokenLogits {
  ObjectiveResult operator()(const Tensor& hidden, Parameter& head, const MicroBatch& batch) const {
    const Tensor last = batch.cu_seqlens.slice(0, 1).to(kLong) - 1; // (D)
    return {{}, {}, head_logits(hidden.index_select(0, last), head)};
  }
};

// Logits of every token: per_token (T, V). For traces of small models.
struct AllLogits {
  ObjectiveResult operator()(const Tensor& hidden, Parameter& head, const MicroBatch&) const {
    return {{}, {}, head_logits(hidden, head)};
  }
};
}
