#include "engine/objectives.h"

#include "operators/linear_cross_entropy.h"

namespace pith {

ObjectiveResult NextTokenLoss::operator()(
    const Tensor& hidden, Parameter& head, const MicroBatch& batch) const {
  // A batch without a trained token has loss 0 and no gradient, not 0 / 0.
  const auto count = static_cast<double>(batch.global_trained_tokens);
  const CrossEntropy result =
      linear_cross_entropy(hidden, head, batch.labels, count > 0 ? 1 / count : 0);
  return {result.loss, result.loss_sum, result.logprobs};
}

ObjectiveResult LastTokenLogits::operator()(
    const Tensor& hidden, Parameter& head, const MicroBatch& batch) const {
  const Tensor last = batch.cu_seqlens.slice(0, 1).to(at::kLong) - 1;  // (D)
  return {{}, {}, head_logits(hidden.index_select(0, last), head)};
}

ObjectiveResult AllLogits::operator()(
    const Tensor& hidden, Parameter& head, const MicroBatch&) const {
  return {{}, {}, head_logits(hidden, head)};
}

}  // namespace pith
