#include "operators/permute.h"
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include "operators/function.h"

namespace pith {
namespace {
Tensor gather_sum(const Tensor& slots, const Tensor& weight, const Tensor& slot_of) {
  Tensor out = at::empty({slot_of.size(0), slots.size(1)}, slots.options());
  PITH_IF_CUDA (slots) {
    cuda::gather_sum(write(out), read(slots), read<float>(weight), read<int32_t>(slot_of),
      slot_of.size(0), slot_of.size(1), slots.size(1));
  }
  return out;
}
}

// A stable sort keeps an expert's entries in order of rows; those of -1 come first.
ExpertPlan make_expert_plan(
  const Tensor& topk_idx, int64_t num_experts, optional<int64_t> num_slots) {
  NoGradGuard no_grad;
  const int64_t count = topk_idx.numel();
  check_tensor(topk_idx, "make_expert_plan: topk_idx", kLong, {-1, -1});
  PITH_CHECK(num_experts >= 1 && num_experts < INT16_MAX && topk_idx.size(1) >= 1,
    "make_expert_plan: {} experts, top {}", num_experts, topk_idx.size(1));
  PITH_CHECK(count <= INT32_MAX, "make_expert_plan: {} entries do not fit into int32 slots", count);
  check_ids(topk_idx, "make_expert_plan: topk_idx", num_experts, /*none=*/-1);
  const auto int32 = topk_idx.options().dtype(kInt);
  const Tensor ids = topk_idx.to(at::kShort).view(-1); // short keys sort faster
  const auto [experts, entries] = at::sort(ids, /*stable=*/true, 0, /*descending=*/false);
  const Tensor ends = at::searchsorted(experts, at::arange(-1, num_experts, ids.options()),
    /*out_int32=*/true, /*right=*/true);
  const int64_t absent =
    num_slots && topk_idx.is_cuda() ? count - *num_slots : ends[0].item<int32_t>();
  const int64_t slots = count - absent;
  PITH_CHECK(num_slots.value_or(slots) == slots, "make_expert_plan: topk_idx has {} slots, not {}",
    slots, *num_slots);
  ExpertPlan plan;
  plan.offsets = ends.narrow(0, 1, num_experts) - absent;
  const Tensor chosen = entries.narrow(0, absent, slots);
  plan.row_of_slot = chosen.div(topk_idx.size(1), "floor").to(kInt);
  plan.slot_of = at::full(topk_idx.sizes(), -1, int32);
  plan.slot_of.view(-1).index_copy_(0, chosen, at::arange(slots, int32));
  return plan;
}

Tensor permute(const Tensor& given, const Gather& plan) {
  check_shape(given, "permute: rows", {plan.slot_of.size(0), -1});
  const Tensor rows = given.contiguous();
  PITH_IF_CUDA (rows) {
    const Tensor out = at::empty({plan.num_slots(), rows.size(1)}, rows.options());
    cuda::scatter_rows(out.mutable_data_ptr(), rows.const_data_ptr(), read<int32_t>(plan.slot_of),
      rows.size(0), plan.slot_of.size(1), rows.size(1) * rows.element_size());
    return record(
      out, {rows}, [plan](const Tensor& dy) { return Tensors{sum_slots(dy.contiguous(), plan)}; });
  }
  return widen(rows).index_select(0, plan.row_of_slot).to(rows.scalar_type());
}

Tensor sum_slots(const Tensor& slots, const Gather& plan) {
  PITH_IF_CUDA (slots) { return gather_sum(slots, {}, plan.slot_of); }
  const Tensor wide = widen(slots);
  return at::zeros({plan.slot_of.size(0), slots.size(1)}, wide.options())
    .index_add_(0, plan.row_of_slot, wide)
    .to(slots.scalar_type());
}

Tensor unpermute(const Tensor& given, const Tensor& given_weight, const ExpertPlan& plan) {
  const Tensor slot_of = plan.slot_of, slots = given.contiguous();
  const Tensor weight = given_weight.contiguous();
  check_shape(slots, "unpermute: expert_rows", {plan.num_slots(), -1});
  check_tensor(weight, "unpermute: weight", wide_dtype(slots.scalar_type()),
    {slot_of.size(0), slot_of.size(1)});
  PITH_IF_CUDA (slots) {
    return record(gather_sum(slots, weight, slot_of), {slots, weight},
      [slots, weight, slot_of](const Tensor& dy) {
      const Tensor dout = dy.contiguous();
      const Tensor dslots = at::empty_like(slots), dweight = at::empty_like(weight);
      cuda::unpermute_backward(write(dslots), write<float>(dweight), read(dout), read(slots),
        read<float>(weight), read<int32_t>(slot_of), slot_of.size(0), slot_of.size(1),
        slots.size(1));
      return Tensors{dslots, dweight};
    });
  }
  const Tensor entry = slot_of.view(-1).ge(0).nonzero().squeeze(1); // with a slot
  const Tensor factor = weight.view(-1).index_select(0, entry).unsqueeze(1);
  const Tensor rows = widen(slots).index_select(0, slot_of.view(-1).index_select(0, entry));
  return at::zeros({slot_of.size(0), slots.size(1)}, rows.options())
    .index_add(0, entry.div(slot_of.size(1), "floor"), rows * factor)
    .to(slots.scalar_type());
}
}
