// The router: probabilities, top-k with ties to the lower id, routing weights, balance loss per
// sequence.
#pragma once
#include "core/comm.h"

#if PITH_CUDA
struct CUstream_st;
#endif

namespace pith {

// Largest k of each row of scores (T, E), sorted by descending score; equal scores go to the lower
// expert id. -> (T, k) int64. A row that holds NaN throws on the CPU; on CUDA NaN counts as the
// smallest value, so that ids stay distinct and the step's check of the loss reports it. On CUDA E
// <= 1024.
Tensor topk_lowest_id(const Tensor& scores, int64_t k);

struct Routing {
  Tensor probabilities;  // (T, E) float32 softmax of all logits, differentiable
  Tensor topk_idx;       // (T, K) int64
  Tensor topk_weight;    // (T, K) float32, differentiable
};

// logits (T, E) float32 -> softmax over all experts, and the top-k of the logits, which orders them
// as the probabilities do, before these are rounded (Qwen3-MoE, Mixtral). With `normalize` the
// chosen probabilities are divided by their sum (norm_topk_prob). `forced` (T, K) int64, when
// defined, takes the place of the selection (replayed routes, forced balance); weights still come
// from these logits.
Routing route(const Tensor& logits, int64_t k, bool normalize, const Tensor& forced = {});

// (T, K) int64 that loads all experts equally, for measurements: slot j of token t -> (t K + j) mod
// E.
Tensor balanced_routes(int64_t num_tokens, int64_t k, int64_t num_experts, at::Device device);

// Load-balance loss summed over rows (DeepSeek-V2, arXiv 2405.04434, eq. 12 to 14, per sequence):
// for each row sum_e (E / (K T_row)) count_e * mean_t probability_e, which is 1 for a perfectly
// balanced row. probabilities (T, E) float32, topk_idx (T, K), row_id (T) int32 in [0, num_rows),
// ascending -> scalar, differentiable in probabilities. Counts are integers. Divide by the global
// number of rows for the mean; rows must not be cut between calls; a row without tokens adds 0.
// Where rows are split over `context`, counts are summed over it (collective, in the forward pass
// only), and the result is what the local tokens add to the loss of the whole rows.
Tensor sequence_balance_loss(const Tensor& probabilities, const Tensor& topk_idx,
    const Tensor& row_id, int64_t num_rows, const Comm& context = {});

#if PITH_CUDA
namespace cuda {

// One warp a row of scores (rows, E), E <= 1024, k <= E -> idx (rows, k).
void topk_lowest_id(const float* scores, int64_t* idx, int64_t rows, int64_t num_experts, int64_t k,
    CUstream_st* stream);

// Softmax of logits (rows, E), their top-k (or `forced` (rows, k) copied, when not null) and its
// weights.
void route_forward(const float* logits, const int64_t* forced, float* probabilities, int64_t* idx,
    float* weight, int64_t rows, int64_t num_experts, int64_t k, bool normalize,
    CUstream_st* stream);

// dlogits from dprobabilities (may be null) and dweight (may be null).
void route_backward(const float* probabilities, const int64_t* idx, const float* dprobabilities,
    const float* dweight, float* dlogits, int64_t rows, int64_t num_experts, int64_t k,
    bool normalize, CUstream_st* stream);

// A row's tokens are summed in this many parts.
inline constexpr int64_t kBalanceParts = 32;

// sum and count (num_rows, kBalanceParts, E) of probabilities and choices; start (num_rows + 1):
// first token of each row.
void balance_parts(const float* probabilities, const int64_t* idx, const int32_t* row_id,
    float* sum, int32_t* count, int32_t* start, int64_t tokens, int64_t num_experts, int64_t k,
    int64_t num_rows, CUstream_st* stream);

// loss (scalar) and coefficient (num_rows, E) = dloss / dprobability of any token of that row, from
// balance_parts. `global` (num_rows, E + 1), where not null: counts and, last, tokens of the rows,
// which are then not taken from count and start.
void balance_total(const float* sum, const int32_t* count, const int32_t* start,
    const int64_t* global, float* loss, float* coefficient, int64_t num_experts, int64_t k,
    int64_t num_rows, CUstream_st* stream);

// dprobabilities (T, E) = dloss (scalar on the device) * coefficient[row_id].
void balance_backward(const float* dloss, const float* coefficient, const int32_t* row_id,
    float* dprobabilities, int64_t tokens, int64_t num_experts, CUstream_st* stream);

}  // namespace cuda
#endif

}  // namespace pith
