// Expert parallelism: a row travels once to each rank with experts of it, their sum comes back.
#pragma once
#include <c10/core/Event.h>

#include "core/comm.h"
#include "operators/permute.h"

namespace pith {

// The travels of one micro-batch's rows in one layer: T rows of this rank go out as S copies, R
// rows arrive. Each step starts a transfer that the next one waits for.
//   forward    ExpertExchange, dispatch, arrive, combine, combined
//   backward   combine_backward, combined_grad, dispatch_backward, dispatched_grad
class ExpertExchange {
 public:
  ExpertExchange() = default;
  // topk_idx (T, K) int64 global expert ids; rank i of `group` holds the i-th num_experts / size of
  // them. Starts the exchange of counts.
  ExpertExchange(const Comm& group, const Tensor& topk_idx, int64_t num_experts);

  // Waits (the host too) for the counts, sends rows (T, H) and weight (T, K).
  void dispatch(const Tensor& rows, const Tensor& weight);
  // What came: rows (R, H), weight (R, K), and the plan over local experts.
  struct Arrived {
    Tensor rows, weight;
    ExpertPlan plan;
  };
  Arrived arrive();
  // (R, H), one sum for each row that came, goes back.
  void combine(const Tensor& expert_out) { fetch(expert_out.detach()); }
  // (T, H): the plain sum, in FP32, of what came back for each row.
  Tensor combined() { return sum_copies(take()); }

  // The transposed steps: gradient (T, H) of combined() goes to the experts, arrives as (R, H);
  // gradients (R, H) and (R, K) of the arrived rows and weights go back, to (T, H) and (T, K).
  void combine_backward(const Tensor& grad) { send(copies(grad)); }
  Tensor combined_grad() { return take(); }
  void dispatch_backward(const Tensor& grad_rows, const Tensor& grad_weight) {
    fetch(grad_rows);
    fetch(grad_weight);
  }
  std::pair<Tensor, Tensor> dispatched_grad() {
    const Tensor rows = combined();
    return {rows, combined()};
  }
 private:
  // To the experts, (S, ...) -> (R, ...), and back, (R, ...) -> (S, ...): starts a transfer.
  void send(const Tensor& slots) { transfer(slots, received_, sent_); }
  void fetch(const Tensor& rows) { transfer(rows, sent_, received_); }
  void transfer(const Tensor& tensor, const std::vector<int64_t>& recv,
      const std::vector<int64_t>& send);         // rows from and to each member
  Tensor take();                                 // the oldest transfer under way, complete
  Tensor copies(const Tensor& rows) const;       // (T, N) -> (S, N)
  Tensor sum_copies(const Tensor& slots) const;  // (S, N) -> (T, N)

  Comm group_;
  Tensor topk_idx_, destination_;  // (T, K): expert; rank, -1 where an earlier entry goes there too
  int64_t local_experts_ = 0;
  // Host (2, size, 1 + local experts) int32, sent and received: rows, then slots by expert, of each
  // rank. On CUDA a copy under way until counted_.
  Tensor counts_;
  std::optional<c10::Event> counted_;
  std::vector<int64_t> sent_, received_;  // rows by rank
  ExpertPlan by_rank_;                    // T rows to S copies, sorted by rank
  std::deque<std::pair<Tensor, Work>> transfers_;
};

}
