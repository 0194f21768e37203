// Grouping of token rows by expert, and the weighted sum back.
#pragma once
#include "core/tensor.h"

#if PITH_CUDA
struct CUstream_st;
#endif

namespace pith {

// Which row goes to which of E local experts. Slots are sorted by expert, within an expert by row,
// so that sums have one order. S = number of entries >= 0 in topk_idx.
struct ExpertPlan {
  Tensor row_of_slot;  // (S) int32: row of `rows` that stands in this slot
  Tensor slot_of;  // (R, K) int32: slot of entry (row, j), or -1 where the entry is not of these
                   // experts
  Tensor offsets;  // (E) int32: end of each expert's slots, cumulative
  Tensor offsets_host;    // the same on the CPU (waits for the device once)
  int64_t num_slots = 0;  // S
};

// topk_idx (R, K) int64 with local expert ids in [0, E), or -1 for entries of other ranks; R * K <
// 2^31 and on CUDA E <= 1024. `offsets_host`: the plan's, where the caller knows them; then nothing
// is waited for.
ExpertPlan make_expert_plan(const Tensor& topk_idx, int64_t num_experts,
                            const Tensor& offsets_host = {});

// rows (R, H) -> (S, H): row_of_slot's rows (float32, bfloat16, on the CPU also float64). Backward
// sums a row's slots in FP32.
Tensor permute(const Tensor& rows, const ExpertPlan& plan);

// expert_rows (S, H), weight (R, K) float32 -> (R, H): sum over j of weight(r, j) *
// expert_rows(slot_of(r, j)), in FP32, rounded once to expert_rows' dtype; entries of -1 add
// nothing, a row without experts becomes 0. Differentiable in both: d weight(r, j) = <d out(r),
// expert_rows(slot)>, 0 where the entry is -1.
Tensor unpermute(const Tensor& expert_rows, const Tensor& weight, const ExpertPlan& plan);

#if PITH_CUDA
namespace cuda {

// Bytes of scratch that expert_plan needs for R * K entries.
int64_t expert_plan_workspace(int64_t entries, int64_t num_experts);

// Fills row_of_slot (R * K reserved), slot_of (R, K) and offsets (E + 1): the ends, then the number
// of ids that are neither -1 nor in [0, E).
void expert_plan(const int64_t* topk_idx, int64_t entries, int64_t k, int64_t num_experts,
                 int32_t* row_of_slot, int32_t* slot_of, int32_t* offsets, void* workspace,
                 CUstream_st* stream);

// out (S, H) = rows[row_of_slot], rows of row_bytes bytes.
void gather_rows(void* out, const void* rows, const int32_t* row_of_slot, int64_t slots,
                 int64_t row_bytes, CUstream_st* stream);

// out (R, H) = sum over j of weight(r, j) * slots(slot_of(r, j)); weight may be null (all 1).
void gather_sum(void* out, const void* slots, const float* weight, const int32_t* slot_of,
                int64_t rows, int64_t k, int64_t hidden, bool is_bf16, CUstream_st* stream);

// dslots(slot_of(r, j)) = weight(r, j) * dout(r); dweight(r, j) = <dout(r), slots(slot_of(r, j))>.
void unpermute_backward(void* dslots, float* dweight, const void* dout, const void* slots,
                        const float* weight, const int32_t* slot_of, int64_t rows, int64_t k,
                        int64_t hidden, bool is_bf16, CUstream_st* stream);

}  // namespace cuda
#endif

}  // namespace pith
