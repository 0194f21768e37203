// The router: probabilities, top-k (ties to the lower id), weights, balance loss per sequence.
#pragma once
#include "core/comm.h"

namespace pith {

struct Routing {
  Tensor probabilities;  // (T, E) float32 softmax of all logits, differentiable
  Tensor topk_idx;       // (T, K) int64
  Tensor topk_weight;    // (T, K) float32, differentiable
};

// logits (T, E) float32 -> softmax over all experts, and the top-k of the logits, which are ordered
// as the probabilities before these are rounded: by descending logit, equal ones by ascending id.
// With `normalize` the chosen probabilities are divided by their sum (norm_topk_prob). `forced`
// (T, K) int64, when defined, takes the place of the selection (replayed routes, forced balance);
// weights still come from these logits. A NaN throws on the CPU; on CUDA, where E <= 1024, it is
// the smallest value: ids stay distinct and the step's check of the loss reports it.
Routing route(const Tensor& logits, int64_t k, bool normalize, const Tensor& forced = {});

// scores (T, E) -> (T, k) int64: what route() would choose.
Tensor topk_lowest_id(const Tensor& scores, int64_t k);

// logits (T, E) -> (T, k) int64 for `forced`, each token's experts from few groups (DeepSeek-V2,
// arXiv 2405.04434, 2.2.3): E / groups neighbours are a group; the topk_groups groups with the
// highest single logits are taken, then the top-k of their experts.
Tensor group_limited_topk(const Tensor& logits, int64_t k, int64_t groups, int64_t topk_groups);

// (T, K) int64 that loads all experts equally, for measurements: entry (t, j) is (t K + j) mod E.
Tensor balanced_routes(int64_t num_tokens, int64_t k, int64_t num_experts, at::Device device);

// Load-balance loss summed over rows (DeepSeek-V2, arXiv 2405.04434, eq. 12 to 14, per sequence):
// for each row sum_e (E / (K T_row)) count_e * mean_t probability_e, which is 1 for a perfectly
// balanced row. probabilities (T, E) float32, topk_idx (T, K), row_id (T) int32 in [0, num_rows),
// ascending, or ~row for padding at the end of a row, which does not count -> scalar,
// differentiable in probabilities. Counts are integers. Divide by the global number of rows for the
// mean; rows must not be cut between calls; a row without tokens adds 0. Where rows are split over
// `context`, counts are summed over it (collective, in the forward pass only), and the result is
// what the local tokens add to the loss of the whole rows. They travel until the result is called.
std::function<Tensor()> start_balance_loss(const Tensor& probabilities, const Tensor& topk_idx,
    const Tensor& row_id, int64_t num_rows, const Comm& context = {});
inline Tensor sequence_balance_loss(const Tensor& probabilities, const Tensor& topk_idx,
    const Tensor& row_id, int64_t num_rows, const Comm& context = {}) {
  return start_balance_loss(probabilities, topk_idx, row_id, num_rows, context)();
}

}  // namespace pith
