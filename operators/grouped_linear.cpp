#include "operators/grouped_linear.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>

#include "operators/function.h"

namespace pith {
namespace {

// at::_grouped_mm wants rows of 16-byte multiples at 16-byte addresses in every operand and result.
bool grouped_mm_fits(const Tensor& x, const Tensor& matrices) {
  auto aligned = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  };
  return x.is_cuda() && is_bf16(x) && matrices.size(1) % 8 == 0 && matrices.size(2) % 8 == 0 &&
         aligned(x) && aligned(matrices);
}

// x (S, K) times its expert's matrix of matrices (E, K, N) -> (S, N).
Tensor multiply(
    const Tensor& x, const Tensor& matrices, const Tensor& offsets, const Tensor& offsets_host) {
  if (x.size(0) > 0 && grouped_mm_fits(x, matrices)) {
    return at::_grouped_mm(x, matrices, offsets);
  }
  Tensor y = at::empty({x.size(0), matrices.size(2)}, x.options());
  for_each_expert(offsets_host, [&](int64_t e, int64_t begin, int64_t count) {
    Tensor rows = y.narrow(0, begin, count);
    mm_rounded_out(rows, x.narrow(0, begin, count), matrices.select(0, e));
  });
  return y;
}

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& value,
      Parameter* weight, const ExpertPlan* plan) {
    ctx->save_for_backward({x});
    ctx->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    ctx->saved_data["offsets"] = plan->offsets;
    ctx->saved_data["offsets_host"] = plan->offsets_host;
    return multiply(x, value.transpose(1, 2), plan->offsets, plan->offsets_host);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    const Tensor x = ctx->get_saved_variables()[0];
    auto* weight = reinterpret_cast<Parameter*>(ctx->saved_data["weight"].toInt());
    const Tensor offsets = ctx->saved_data["offsets"].toTensor();
    const Tensor offsets_host = ctx->saved_data["offsets_host"].toTensor();
    const Tensor dy = grads[0].contiguous();

    Tensor dx;
    if (ctx->needs_input_grad(0)) dx = multiply(dy, weight->value, offsets, offsets_host);
    if (ctx->needs_input_grad(1)) add_or_defer({weight, dy, x, offsets, offsets_host});
    return {dx, Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor grouped_linear(const Tensor& x, Parameter& weight, const ExpertPlan& plan) {
  const int64_t num_experts = plan.offsets_host.numel();
  check_shape(weight.value, weight.name, {num_experts, -1, -1});
  check_shape(x, "grouped_linear: x", {plan.num_slots, weight.value.size(2)});
  check_dtype(x, "grouped_linear: x", weight.value.scalar_type());
  return GroupedLinear::apply(x.contiguous(), weight.value, &weight, &plan);
}

}  // namespace pith
