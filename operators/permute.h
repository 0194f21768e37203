// Grouping of token rows by expert, and the weighted sum back.
#pragma once
#include "core/microbatch.h"

namespace pith {

// Which row goes to which of E local experts. Slots are sorted by expert, within an expert by row,
// so that sums have one order. S = number of entries >= 0 in topk_idx; the others have no slot.
struct ExpertPlan : Gather {
  Tensor offsets;  // (E) int32: end of each expert's slots, cumulative
};

// topk_idx (R, K) int64: local expert ids in [0, E), or -1 for entries of other ranks; R * K < 2^31
// and E < 2^15. Where the caller knows S, `num_slots`, nothing waits for the device.
ExpertPlan make_expert_plan(
    const Tensor& topk_idx, int64_t num_experts, std::optional<int64_t> num_slots = {});

// rows (R, H) -> (S, H): row_of_slot's rows. Backward sums a row's slots in FP32.
Tensor permute(const Tensor& rows, const Gather& plan);

// permute's backward: slots (S, H) -> (R, H), the sum of each row's slots in FP32. Not
// differentiable.
Tensor sum_slots(const Tensor& slots, const Gather& plan);

// expert_rows (S, H), weight (R, K) float32 -> (R, H): sum over j of weight(r, j) *
// expert_rows(slot_of(r, j)), in FP32, rounded once to expert_rows' dtype; entries of -1 add
// nothing, a row without experts becomes 0. Differentiable in both: d weight(r, j) = <d out(r),
// expert_rows(slot)>, 0 where the entry is -1.
Tensor unpermute(const Tensor& expert_rows, const Tensor& weight, const ExpertPlan& plan);

}
