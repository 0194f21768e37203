// Expert parallelism: a row travels once to each rank with experts of it; their sum comes back.
#pragma once
#include <c10/core/Event.h>
#include "core/comm.h"
#include "operators/permute.h"

namespace pith {
// One micro-batch's rows in one layer: T rows of this rank go out as S copies, R rows arrive. Each
// step starts a transfer that the next one waits for.
//   forward    ExpertExchange, dispatch, arrive, combine, combined
//   backward   combine_backward, combined_grad, dispatch_backward, dispatched_grad
class ExpertExchange {
 public:
  ExpertExchange() = default;
  // topk_idx (T, K) int64 global ids; member i holds the i-th num_experts / size. Sends counts.
  ExpertExchange(const Comm& group, const Tensor& topk_idx, int64_t num_experts);

  // Waits (the host too) for counts, sends rows (T, H) and weight (T, K).
  void dispatch(const Tensor& rows, const Tensor& weight);
  // Rows (R, H), weight (R, K), and the plan over local experts.
  struct Arrived {
    Tensor rows, weight;
    ExpertPlan plan;
  };
  Arrived arrive();
  // (R, H), one sum for each arrived row, goes back.
  void combine(const Tensor& expert_out) { fetch(expert_out.detach()); }
  // (T, H): the plain sum, in FP32, of what came back.
  Tensor combined() { return sum_copies(take()); }

  // The transposed steps: gradient (T, H) of combined() arrives as (R, H); gradients (R, H) and (R,
  // K) of arrived rows and weights go back, to (T, H) and (T, K).
  void combine_backward(const Tensor& grad) { send(copies(grad)); }
  Tensor combined_grad() { return take(); }
  void dispatch_backward(const Tensor& grad_rows, const Tensor& grad_weight) {
    fetch(grad_rows);
    fetch(grad_weight);
  }
  pair<Tensor, Tensor> dispatched_grad() {
    const Tensor rows = combined();
    return {rows, combined()};
  }
 private:
  // (S, ...) -> (R, ...) to the experts, and back: starts a transfer.
  void send(const Tensor& slots) { transfer(slots, received_, sent_); }
  void fetch(const Tensor& rows) { transfer(rows, sent_, received_); }
  void transfer(const Tensor& tensor, const vector<int64_t>& recv,
    const vector<int64_t>& send); // rows by member
  Tensor take(); // the oldest transfer, complete
  Tensor copies(const Tensor& rows) const; // (T, N) -> (S, N)
  Tensor sum_copies(const Tensor& slots) const; // (S, N) -> (T, N)

  Comm group_;
  Tensor topk_idx_, destination_; // (T, K): expert; rank, -1 where an earlier entry goes too
  int64_t local_experts_ = 0;
  // Host (2, size, 1 + local experts) int32, sent and received: rows, slots by expert, of each
  // rank. On CUDA a copy under way until counted_.
  Tensor counts_;
  optional<c10::Event> counted_;
  vector<int64_t> sent_, received_; // rows by rank
  ExpertPlan by_rank_; // T rows to S copies, by rank
  deque<pair<Tensor, Work>> transfers_;
};
}
