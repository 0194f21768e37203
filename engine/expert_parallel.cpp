#include "engine/expert_parallel.h"
#include <ATen/ops/searchsorted.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include "operators/matmul.h"

namespace pith {
ExpertExchange::ExpertExchange(const Comm& group, const Tensor& topk_idx, int64_t num_experts)
    : group_(group), topk_idx_(topk_idx), local_experts_(div_exact(num_experts, group.size())) {
  const int64_t ranks = group.size();
  if (ranks == 1) return;
  const NoGradGuard no_grad;
  destination_ = topk_idx.div(local_experts_, "floor");
  const Tensor same = destination_.unsqueeze(2) == destination_.unsqueeze(1); // (T, K, K)
  const Tensor repeated = same.tril(-1).any(-1);
  const Tensor owner = destination_;
  destination_ = destination_.masked_fill(repeated, -1);

  // By (rank, rows or expert); repeated entries count into a cell of their own.
  const int64_t width = 1 + local_experts_, cells = ranks * width;
  const Tensor rows = at::where(repeated, cells, owner * width).view({-1});
  const Tensor slots = (topk_idx + owner + 1).view({-1}); // rank * width + 1 + local expert
  const auto int32 = topk_idx.options().dtype(kInt);
  const Tensor cell = at::cat({rows, slots});
  Tensor counts = at::zeros({2, cells}, int32);
  counts[0] = at::zeros({cells + 1}, int32)
                .scatter_add_(0, cell, at::ones({cell.numel()}, int32))
                .narrow(0, 0, cells);
  const vector<int64_t> one_each(index(ranks), 1);
  Tensor received = counts[1].view({ranks, width});
  group.all_to_all_async(received, counts[0].view({ranks, width}), one_each, one_each).wait();
  counts_ = counts;
  if (counts.is_cuda()) {
    counts_ = at::empty(counts.sizes(), TensorOptions(kInt).pinned_memory(true));
    counts_.copy_(counts, /*non_blocking=*/true);
    counted_.emplace(kCUDA);
    counted_->record(c10::impl::VirtualGuardImpl(kCUDA).getStream(counts.device()));
  }
}

Tensor ExpertExchange::take() {
  auto [tensor, work] = std::move(transfers_.front());
  transfers_.pop_front();
  work.wait();
  return tensor;
}

void ExpertExchange::transfer(
  const Tensor& tensor, const vector<int64_t>& recv, const vector<int64_t>& send) {
  Tensor out = tensor;
  Work work;
  if (group_.size() > 1) {
    vector<int64_t> shape = tensor.sizes().vec();
    shape[0] = reduce(recv.begin(), recv.end());
    out = at::empty(shape, tensor.options());
    work = group_.all_to_all_async(out, tensor.contiguous(), recv, send);
  }
  transfers_.emplace_back(out, std::move(work));
}

Tensor ExpertExchange::copies(const Tensor& rows) const {
  const NoGradGuard no_grad;
  return group_.size() == 1 ? rows : permute(rows, by_rank_);
}

Tensor ExpertExchange::sum_copies(const Tensor& slots) const {
  if (group_.size() == 1) return slots;
  const NoGradGuard no_grad;
  const auto wide = slots.options().dtype(wide_dtype(slots.scalar_type()));
  return unpermute(slots, at::ones(destination_.sizes(), wide), by_rank_);
}

void ExpertExchange::dispatch(const Tensor& rows, const Tensor& weight) {
  const NoGradGuard no_grad;
  const int64_t ranks = group_.size();
  if (ranks == 1) {
    send(rows);
    return send(weight);
  }
  if (counted_) counted_->synchronize();
  const int32_t* count = counts_.const_data_ptr<int32_t>();
  const int64_t width = 1 + local_experts_;
  for (int64_t r = 0; r < ranks; ++r) {
    sent_.push_back(count[r * width]);
    received_.push_back(count[(ranks + r) * width]);
  }
  by_rank_ = make_expert_plan(destination_, ranks, reduce(sent_.begin(), sent_.end()));

  send(copies(rows));
  const Tensor row = by_rank_.row_of_slot;
  send(weight.index_select(0, row));
  // Copies carry ids of their rank's experts, from its first on.
  const Tensor slot = at::arange(by_rank_.num_slots(), by_rank_.offsets.options());
  const Tensor rank = at::searchsorted(by_rank_.offsets, slot, /*out_int32=*/false, /*right=*/true);
  const Tensor local = topk_idx_.index_select(0, row) - rank.unsqueeze(1) * local_experts_;
  send(at::where((local >= 0).logical_and_(local < local_experts_), local, -1));
}

ExpertExchange::Arrived ExpertExchange::arrive() {
  const Tensor rows = take(), weight = take();
  const int64_t ranks = group_.size(), width = 1 + local_experts_;
  if (ranks == 1)
    return {rows, weight, make_expert_plan(topk_idx_, local_experts_, topk_idx_.numel())};
  const int32_t* count = counts_.const_data_ptr<int32_t>() + ranks * width;
  int64_t slots = 0;
  for (int64_t r = 0; r < ranks; ++r)
    slots = reduce(count + r * width + 1, count + (r + 1) * width, slots);
  return {rows, weight, make_expert_plan(take(), local_experts_, slots)};
}
}
