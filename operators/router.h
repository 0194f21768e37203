#pragma once
#include "core/comm.h"

namespace pith {
struct Routing {
  Tensor probabilities; // (T, E) float32 softmax of all logits, differentiable
  Tensor topk_idx; // (T, K) int64
  Tensor topk_weight; // (T, K) float32, differentiable
};

// logits (T, E) float32 -> softmax over all experts, and the top-k of the logits, ordered as the
// unrounded probabilities: descending, ties by ascending id. `normalize`: the chosen probabilities
// are divided by their sum (norm_topk_prob). `forced` (T, K) int64, when defined, is the selection
// (replayed routes, forced balance); weights still come from these logits. A NaN is the smallest
// value: ids stay distinct, and the step's check of the loss reports it. On CUDA E <= 1024.
Routing route(const Tensor& logits, int64_t k, bool normalize, const Tensor& forced = {});

// scores (T, E) -> (T, k) int64, as route() chooses.
Tensor topk_lowest_id(const Tensor& scores, int64_t k);

// logits (T, E) -> (T, k) int64 for `forced`, from few groups (DeepSeek-V2, arXiv 2405.04434,
// 2.2.3): E / groups neighbours are a group; of the topk_groups groups with the highest single
// logits, the top-k experts.
Tensor group_limited_topk(const Tensor& logits, int64_t k, int64_t groups, int64_t topk_groups);

// (T, K) int64, equal loads, for measurements: entry (t, j) is (t K + j) mod E.
Tensor balanced_routes(int64_t num_tokens, int64_t k, int64_t num_experts, Device device);

// Whose share of choices an expert is charged for: its row's (DeepSeek-V2, arXiv 2405.04434, eq. 12
// to 14), the micro-batch's, or that of the step before's whole batch.
enum class BalanceKind { sequence, micro_batch, global_batch };

struct RouterBalance {
  Tensor loss; // scalar, differentiable in the probabilities
  Tensor counts; // (E) int64: these tokens' choices, without padding
};

// Summed over rows, which must not be cut between calls: for each row E sum_e share_e * mean_t
// probability_e, 1 for balanced shares. probabilities (T, E) float32, topk_idx (T, K), row_id (T)
// int32 in [0, num_rows), or ~row for padding, not counted; shares (E) float64: of global_batch.
// Rows split over `context`: counts are summed over it (collective, forward pass only; they travel
// until the result is called), and the loss is the local tokens' part.
function<RouterBalance()> start_balance_loss(const Tensor& probabilities, const Tensor& topk_idx,
  const Tensor& row_id, int64_t num_rows, const Comm& context = {},
  BalanceKind kind = BalanceKind::sequence, const Tensor& shares = {});
}
