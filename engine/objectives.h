// Objectives: what the last stage computes from the hidden states. Each is a template parameter of
// the pipeline.
#pragma once
#include "core/microbatch.h"
#include "core/parameter.h"

namespace pith {

struct ObjectiveResult {
  Tensor loss;  // root of the backward pass (gradient 1), scaled by 1 / global trained tokens; or
                // undefined
  Tensor loss_sum;   // scalar float32: sum of the token losses of this micro-batch, no gradient
  Tensor per_token;  // what the objective reports for each token (or row), no gradient
};

// Cross-entropy of the next token. per_token: log-probability of the label (T), 0 where it is -100.
struct NextTokenLoss {
  ObjectiveResult operator()(const Tensor& hidden, Parameter& head, const MicroBatch& batch) const;
};

// Logits (float32) of the last token of each document, for sampling: per_token (D, V).
struct LastTokenLogits {
  ObjectiveResult operator()(const Tensor& hidden, Parameter& head, const MicroBatch& batch) const;
};

// Logits of every token: per_token (T, V). For traces of small models.
struct AllLogits {
  ObjectiveResult operator()(const Tensor& hidden, Parameter& head, const MicroBatch& batch) const;
};

}  // namespace pith
