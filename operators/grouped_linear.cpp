#include "operators/grouped_linear.h"
#include <ATen/ops/_grouped_mm.h>
#include "operators/function.h"

namespace pith {
namespace {
// at::_grouped_mm wants rows of 16-byte multiples at 16-byte addresses everywhere.
bool grouped_mm_fits(const Tensor& x, const Tensor& matrices) {
  auto aligned = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  };
  return x.is_cuda() && is_bf16(x) && matrices.size(1) % 8 == 0 && matrices.size(2) % 8 == 0 &&
      aligned(x) && aligned(matrices);
}

// x (S, K), or the rows of which `listed` makes that, times matrices (E, K, N), or a transposed
// view of such, by expert, plus a bias (E, N), if any -> (S, N).
Tensor multiply_grouped(const Tensor& x, const Tensor& matrices, const ExpertPlan& plan,
    const Tensor& bias = {}, bool listed = false) {
  const at::NoGradGuard no_grad;
  Tensor y = at::empty({listed ? plan.num_slots() : x.size(0), matrices.size(2)}, x.options());
  PITH_IF_CUDA (y) {
    if (is_bf16(y) &&
        cuda::grouped_product(x.const_data_ptr(),
            listed ? read<int32_t>(plan.row_of_slot) : nullptr, matrices.const_data_ptr(),
            matrices.is_contiguous(), read<int32_t>(plan.offsets), read(bias).pointer,
            y.mutable_data_ptr(), y.size(0), matrices.size(0), x.size(1), y.size(1)))
      return y;
  }
  const Tensor rows = listed ? permute(x.detach(), plan) : x;
  if (rows.size(0) > 0 && grouped_mm_fits(rows, matrices))
    y = at::_grouped_mm(rows, matrices, plan.offsets);
  else
    for_each_expert(plan.offsets, [&](int64_t e, int64_t begin, int64_t count) {
      Tensor of_expert = y.narrow(0, begin, count);
      multiply_into(of_expert, rows.narrow(0, begin, count), matrices.select(0, e));
    });
  if (!bias.defined()) return y;
  PITH_IF_CUDA (y) {
    cuda::add_expert_bias(
        read(bias), read<int32_t>(plan.offsets), write(y), bias.size(0), bias.size(1));
    return y;
  }
  for_each_expert(plan.offsets, [&](int64_t e, int64_t begin, int64_t count) {
    y.narrow(0, begin, count).add_(bias.select(0, e));
  });
  return y;
}

// gradient (E, N) += dy (S, N) summed by expert: dy^T ones, in 8 columns, the kernel's fewest.
void add_bias_gradient(const Tensor& gradient, const Tensor& dy, const ExpertPlan& plan) {
  Parameter columns;
  columns.grad = at::zeros({gradient.size(0), gradient.size(1), 8}, gradient.options());
  const Tensor ones = at::ones({dy.size(0), 8}, dy.options());
  add_weight_gradient({&columns, dy, ones, plan.offsets});
  gradient.add_(columns.grad.select(2, 0));
}

// `weight` is (out, in), or, with a bias, (in, out). permuted: `given` are rows.
Tensor apply(const char* name, const Tensor& given, Parameter& weight, const Parameter* bias,
    const ExpertPlan& plan, bool permuted = false) {
  check_shape(weight.value, weight.name, {plan.offsets.numel(), -1, -1});
  const Tensor turned = weight.value.transpose(1, 2);
  const Tensor matrices = bias ? weight.value : turned, backwards = bias ? turned : weight.value;
  check_tensor(given, name, weight.value.scalar_type(),
      {permuted ? plan.slot_of.size(0) : plan.num_slots(), matrices.size(1)});
  if (bias) check_shape(bias->value, bias->name, {matrices.size(0), matrices.size(2)});
  const Tensor kept = given.contiguous();
  const Tensor y = multiply_grouped(kept, matrices, plan, bias ? bias->value : Tensor(), permuted);
  return record(y, {kept, weight.value},
      [=, &weight, trained = weight.value.requires_grad()](const Tensor& given_dy) {
    const Tensor dy = given_dy.contiguous(), x = permuted ? permute(kept.detach(), plan) : kept;
    Tensor dx = kept.requires_grad() ? multiply_grouped(dy, backwards, plan) : Tensor();
    if (permuted && dx.defined()) dx = sum_slots(dx, plan);
    if (trained && bias) add_bias_gradient(bias->grad, dy, plan);
    if (trained) add_or_defer({&weight, bias ? x : dy, bias ? dy : x, plan.offsets});
    return Tensors{dx, Tensor()};
  });
}
}

Tensor grouped_linear(const Tensor& x, Parameter& weight, const ExpertPlan& plan) {
  return apply("grouped_linear: x", x, weight, nullptr, plan);
}
Tensor permuted_linear(const Tensor& rows, Parameter& weight, const ExpertPlan& plan) {
  return apply("permuted_linear: rows", rows, weight, nullptr, plan, /*permuted=*/true);
}
Tensor grouped_affine(
    const Tensor& x, Parameter& weight, const Parameter& bias, const ExpertPlan& plan) {
  return apply("grouped_affine: x", x, weight, &bias, plan);
}
Tensor permuted_affine(
    const Tensor& rows, Parameter& weight, const Parameter& bias, const ExpertPlan& plan) {
  return apply("permuted_affine: rows", rows, weight, &bias, plan, /*permuted=*/true);
}
}
