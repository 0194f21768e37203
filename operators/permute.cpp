#include "operators/permute.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index_select.h>
#include <torch/csrc/autograd/custom_function.h>
#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <limits>

#include "operators/dispatch.h"
#include "operators/matmul.h"

namespace pith {
namespace {

// Rows per task such that a task moves enough elements to be worth a thread.
int64_t grain(int64_t elements_per_row) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, elements_per_row));
}

// out (R, H) = sum over j of weight(r, j) * slots(slot_of(r, j)); without weight, plain sums.
template <class T>
void gather_sum_cpu(Tensor& out, const Tensor& slots, const Tensor& weight, const Tensor& slot_of) {
  using A = Wide<T>;
  const int64_t k = slot_of.size(1), hidden = out.size(1);
  const T* source = slots.const_data_ptr<T>();
  const A* w = weight.defined() ? weight.const_data_ptr<A>() : nullptr;
  const int32_t* slot = slot_of.const_data_ptr<int32_t>();
  T* target = out.mutable_data_ptr<T>();
  at::parallel_for(0, out.size(0), grain(k * hidden), [&](int64_t begin, int64_t end) {
    std::vector<A> sum(static_cast<size_t>(hidden));
    for (int64_t r = begin; r < end; ++r) {
      std::fill(sum.begin(), sum.end(), A{0});
      for (int64_t j = r * k; j < (r + 1) * k; ++j) {
        if (slot[j] < 0) continue;
        const T* row = source + slot[j] * hidden;
        const A factor = w ? w[j] : A{1};
        for (int64_t h = 0; h < hidden; ++h) {
          sum[static_cast<size_t>(h)] += factor * static_cast<A>(row[h]);
        }
      }
      for (int64_t h = 0; h < hidden; ++h) {
        target[r * hidden + h] = static_cast<T>(sum[static_cast<size_t>(h)]);
      }
    }
  });
}

// Dot product in eight partial sums: fixed order, and the compiler can vectorise it.
template <class T>
Wide<T> dot(const T* a, const T* b, int64_t n) {
  Wide<T> lane[8] = {}, tail = 0;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int64_t l = 0; l < 8; ++l) {
      lane[l] += static_cast<Wide<T>>(a[i + l]) * static_cast<Wide<T>>(b[i + l]);
    }
  }
  for (; i < n; ++i) tail += static_cast<Wide<T>>(a[i]) * static_cast<Wide<T>>(b[i]);
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7])) +
         tail;
}

template <class T>
void unpermute_backward_cpu(Tensor& dslots, Tensor& dweight, const Tensor& dout,
                            const Tensor& slots, const Tensor& weight, const Tensor& slot_of) {
  using A = Wide<T>;
  const int64_t k = slot_of.size(1), hidden = dout.size(1);
  const T *gradient = dout.const_data_ptr<T>(), *source = slots.const_data_ptr<T>();
  const A* w = weight.const_data_ptr<A>();
  const int32_t* slot = slot_of.const_data_ptr<int32_t>();
  T* target = dslots.mutable_data_ptr<T>();
  A* dw = dweight.mutable_data_ptr<A>();
  at::parallel_for(0, slot_of.size(0), grain(k * hidden), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin * k; j < end * k; ++j) {
      dw[j] = 0;
      if (slot[j] < 0) continue;
      const T* d = gradient + j / k * hidden;
      T* out = target + slot[j] * hidden;
      dw[j] = dot(d, source + slot[j] * hidden, hidden);
      const A factor = w[j];
      for (int64_t h = 0; h < hidden; ++h) out[h] = static_cast<T>(factor * static_cast<A>(d[h]));
    }
  });
}

Tensor gather_sum(const Tensor& slots, const Tensor& weight, const Tensor& slot_of) {
  Tensor out = at::empty({slot_of.size(0), slots.size(1)}, slots.options());
#if PITH_CUDA
  if (slots.is_cuda()) {
    cuda::gather_sum(out.mutable_data_ptr(), slots.const_data_ptr(),
                     weight.defined() ? weight.const_data_ptr<float>() : nullptr,
                     slot_of.const_data_ptr<int32_t>(), slot_of.size(0), slot_of.size(1),
                     slots.size(1), slots.scalar_type() == at::kBFloat16,
                     c10::cuda::getCurrentCUDAStream().stream());
    return out;
  }
#endif
  dispatch_float(slots, "slots",
                 [&](auto zero) { gather_sum_cpu<decltype(zero)>(out, slots, weight, slot_of); });
  return out;
}

struct Permute : torch::autograd::Function<Permute> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& rows,
                        const ExpertPlan* plan) {
    ctx->saved_data["slot_of"] = plan->slot_of;
#if PITH_CUDA
    if (rows.is_cuda()) {
      Tensor out = at::empty({plan->num_slots, rows.size(1)}, rows.options());
      cuda::gather_rows(out.mutable_data_ptr(), rows.const_data_ptr(),
                        plan->row_of_slot.const_data_ptr<int32_t>(), plan->num_slots,
                        rows.size(1) * rows.element_size(),
                        c10::cuda::getCurrentCUDAStream().stream());
      return out;
    }
#endif
    return at::index_select(rows, 0, plan->row_of_slot);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    at::NoGradGuard no_grad;
    return {gather_sum(grads[0].contiguous(), {}, ctx->saved_data["slot_of"].toTensor()), Tensor()};
  }
};

struct Unpermute : torch::autograd::Function<Unpermute> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& expert_rows,
                        const Tensor& weight, const ExpertPlan* plan) {
    ctx->save_for_backward({expert_rows, weight});
    ctx->saved_data["slot_of"] = plan->slot_of;
    return gather_sum(expert_rows, weight, plan->slot_of);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Tensor &slots = saved[0], &weight = saved[1];
    const Tensor slot_of = ctx->saved_data["slot_of"].toTensor();
    const Tensor dout = grads[0].contiguous();
    Tensor dslots = at::empty_like(slots), dweight = at::empty_like(weight);
#if PITH_CUDA
    if (slots.is_cuda()) {
      cuda::unpermute_backward(
          dslots.mutable_data_ptr(), dweight.mutable_data_ptr<float>(), dout.const_data_ptr(),
          slots.const_data_ptr(), weight.const_data_ptr<float>(), slot_of.const_data_ptr<int32_t>(),
          slot_of.size(0), slot_of.size(1), slots.size(1), slots.scalar_type() == at::kBFloat16,
          c10::cuda::getCurrentCUDAStream().stream());
      return {dslots, dweight, Tensor()};
    }
#endif
    dispatch_float(slots, "expert_rows", [&](auto zero) {
      unpermute_backward_cpu<decltype(zero)>(dslots, dweight, dout, slots, weight, slot_of);
    });
    return {dslots, dweight, Tensor()};
  }
};

// Counting sort by expert; entries are visited in order, so that an expert's slots are sorted by
// row.
void plan_on_cpu(const Tensor& topk_idx, int64_t num_experts, ExpertPlan& plan) {
  const int64_t entries = topk_idx.numel(), k = topk_idx.size(1);
  const int64_t* expert = topk_idx.const_data_ptr<int64_t>();
  std::vector<int32_t> next(static_cast<size_t>(num_experts) + 1,
                            0);  // first free slot of each expert
  for (int64_t i = 0; i < entries; ++i) {
    PITH_CHECK(expert[i] >= -1 && expert[i] < num_experts,
               "make_expert_plan: topk_idx({}, {}) = {} is neither -1 nor in [0, {})", i / k, i % k,
               expert[i], num_experts);
    ++next[static_cast<size_t>(expert[i] + 1)];
  }
  next[0] = 0;  // entries of -1 take no slot
  for (size_t e = 1; e < next.size(); ++e) next[e] += next[e - 1];
  plan.num_slots = next.back();
  plan.offsets = at::empty({num_experts}, topk_idx.options().dtype(at::kInt));
  std::copy(next.begin() + 1, next.end(), plan.offsets.mutable_data_ptr<int32_t>());
  plan.offsets_host = plan.offsets;

  plan.row_of_slot = at::empty({plan.num_slots}, plan.offsets.options());
  plan.slot_of = at::empty(topk_idx.sizes(), plan.offsets.options());
  int32_t* row_of_slot = plan.row_of_slot.mutable_data_ptr<int32_t>();
  int32_t* slot_of = plan.slot_of.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < entries; ++i) {
    slot_of[i] = expert[i] < 0 ? -1 : next[static_cast<size_t>(expert[i])]++;
    if (slot_of[i] >= 0) row_of_slot[slot_of[i]] = static_cast<int32_t>(i / k);
  }
}

#if PITH_CUDA
void plan_on_cuda(const Tensor& topk_idx, int64_t num_experts, const Tensor& offsets_host,
                  ExpertPlan& plan) {
  PITH_CHECK(num_experts <= 1024, "make_expert_plan: {} experts; CUDA takes at most 1024",
             num_experts);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const int64_t entries = topk_idx.numel();
  const auto int32 = topk_idx.options().dtype(at::kInt);
  Tensor ends = at::empty({num_experts + 1}, int32);
  plan.row_of_slot = at::empty({entries}, int32);
  plan.slot_of = at::empty(topk_idx.sizes(), int32);
  Tensor workspace = at::empty({cuda::expert_plan_workspace(entries, num_experts)},
                               topk_idx.options().dtype(at::kByte));
  cuda::expert_plan(topk_idx.const_data_ptr<int64_t>(), entries, topk_idx.size(1), num_experts,
                    plan.row_of_slot.mutable_data_ptr<int32_t>(),
                    plan.slot_of.mutable_data_ptr<int32_t>(), ends.mutable_data_ptr<int32_t>(),
                    workspace.mutable_data_ptr(), stream.stream());
  plan.offsets = ends.narrow(0, 0, num_experts);
  plan.offsets_host = offsets_host;
  if (!offsets_host.defined()) {
    Tensor host = at::empty({num_experts + 1}, at::TensorOptions(at::kInt).pinned_memory(true));
    host.copy_(ends, /*non_blocking=*/true);
    stream.synchronize();  // the one wait: sizes of what follows
    const int32_t wrong = host.const_data_ptr<int32_t>()[num_experts];
    PITH_CHECK(wrong == 0, "make_expert_plan: {} ids in topk_idx are neither -1 nor in [0, {})",
               wrong, num_experts);
    plan.offsets_host = host.narrow(0, 0, num_experts);
  }
  plan.num_slots = plan.offsets_host.const_data_ptr<int32_t>()[num_experts - 1];
  plan.row_of_slot = plan.row_of_slot.narrow(0, 0, plan.num_slots);
}
#endif

void check_rows(const Tensor& rows, const char* name) {
  const auto dtype = rows.scalar_type();
  PITH_CHECK(
      dtype == at::kFloat || dtype == at::kBFloat16 || (dtype == at::kDouble && rows.is_cpu()),
      "{}: expected float32 or bfloat16", describe(rows, name));
}

}  // namespace

ExpertPlan make_expert_plan(const Tensor& topk_idx, int64_t num_experts,
                            const Tensor& offsets_host) {
  at::NoGradGuard no_grad;
  check_shape(topk_idx, "make_expert_plan: topk_idx", {-1, -1});
  check_dtype(topk_idx, "make_expert_plan: topk_idx", at::kLong);
  PITH_CHECK(num_experts >= 1 && topk_idx.size(1) >= 1, "make_expert_plan: {} experts, top {}",
             num_experts, topk_idx.size(1));
  PITH_CHECK(topk_idx.numel() <= std::numeric_limits<int32_t>::max(),
             "make_expert_plan: {} entries do not fit into int32 slots", topk_idx.numel());
  ExpertPlan plan;
#if PITH_CUDA
  if (topk_idx.is_cuda()) {
    plan_on_cuda(topk_idx.contiguous(), num_experts, offsets_host, plan);
    return plan;
  }
#endif
  plan_on_cpu(topk_idx.contiguous(), num_experts, plan);
  PITH_CHECK(!offsets_host.defined() || at::equal(offsets_host, plan.offsets_host),
             "make_expert_plan: the offsets given are not those of topk_idx");
  return plan;
}

Tensor permute(const Tensor& rows, const ExpertPlan& plan) {
  check_shape(rows, "permute: rows", {plan.slot_of.size(0), -1});
  check_rows(rows, "permute: rows");
  return Permute::apply(rows.contiguous(), &plan);
}

Tensor unpermute(const Tensor& expert_rows, const Tensor& weight, const ExpertPlan& plan) {
  check_shape(expert_rows, "unpermute: expert_rows", {plan.num_slots, -1});
  check_rows(expert_rows, "unpermute: expert_rows");
  check_shape(weight, "unpermute: weight", {plan.slot_of.size(0), plan.slot_of.size(1)});
  check_dtype(weight, "unpermute: weight", wide_dtype(expert_rows.scalar_type()));
  return Unpermute::apply(expert_rows.contiguous(), weight.contiguous(), &plan);
}

}  // namespace pith
