#pragma once
#include "core/microbatch.h"

namespace pith {
// Which row goes to which of E local experts. Slots are sorted by expert, then by row: sums have
// one order. S = entries >= 0 in topk_idx; the others have no slot.
struct ExpertPlan : Gather {
  Tensor offsets; // (E) int32: ends of the experts' slots
};

// topk_idx (R, K) int64: local ids in [0, E), or -1 for other ranks' entries; R * K < 2^31, E <
// 2^15. With a known S, `num_slots`, nothing waits for the device.
ExpertPlan make_expert_plan(
  const Tensor& topk_idx, int64_t num_experts, optional<int64_t> num_slots = {});

// rows (R, H) -> (S, H). Backward sums a row's slots in FP32.
Tensor permute(const Tensor& rows, const Gather& plan);

// That backward: slots (S, H) -> (R, H). Not differentiable.
Tensor sum_slots(const Tensor& slots, const Gather& plan);

// expert_rows (S, H), weight (R, K) float32 -> (R, H): sum over j of weight(r, j) *
// expert_rows(slot_of(r, j)), in FP32, rounded once to expert_rows' dtype; entries of -1 add
// nothing, a row without experts becomes 0. Differentiable in both: d weight(r, j) = <d out(r),
// expert_rows(slot)>, 0 for -1.
Tensor unpermute(const Tensor& expert_rows, const Tensor& weight, const ExpertPlan& plan);
}
