#include "operators/grouped_linear.h"

#include <ATen/ops/_grouped_mm.h>

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
Tensor multiply_grouped(const Tensor& x, const Tensor& matrices, const ExpertPlan& plan) {
  const at::NoGradGuard no_grad;
  if (x.size(0) > 0 && grouped_mm_fits(x, matrices))
    return at::_grouped_mm(x, matrices, plan.offsets);
  Tensor y = at::empty({x.size(0), matrices.size(2)}, x.options());
  for_each_expert(plan.offsets_host, [&](int64_t e, int64_t begin, int64_t count) {
    Tensor rows = y.narrow(0, begin, count);
    multiply_into(rows, x.narrow(0, begin, count), matrices.select(0, e));
  });
  return y;
}

}  // namespace

Tensor grouped_linear(const Tensor& given, Parameter& weight, const ExpertPlan& plan) {
  check_shape(weight.value, weight.name, {plan.offsets_host.numel(), -1, -1});
  check_tensor(given, "grouped_linear: x", weight.value.scalar_type(),
      {plan.num_slots, weight.value.size(2)});
  const Tensor x = given.contiguous();
  return record(multiply_grouped(x, weight.value.transpose(1, 2), plan), {x, weight.value},
      [x, &weight, plan, trained = weight.value.requires_grad()](const Tensor& given_dy) {
        const Tensor dy = given_dy.contiguous();
        const Tensor dx = x.requires_grad() ? multiply_grouped(dy, weight.value, plan) : Tensor();
        if (trained) add_or_defer({&weight, dy, x, plan.offsets, plan.offsets_host});
        return Tensors{dx, Tensor()};
      });
}

}  // namespace pith
