#include "operators/grouped_linear.h"
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/searchsorted.h>
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

// x (S, K) times matrices (E, K, N), or a transposed view of such, by expert, plus a bias (E, N),
// if any -> (S, N). With `form` of permute(x, plan), and *activation becomes the result's.
Tensor multiply_grouped(const Tensor& x, const Tensor& matrices, const ExpertPlan& plan,
  const Tensor& bias = {}, const SwigluForm* form = nullptr, Tensor* activation = nullptr) {
  const NoGradGuard no_grad;
  const int64_t columns = matrices.size(2);
  Tensor y = at::empty({form ? plan.num_slots() : x.size(0), columns}, x.options());
  PITH_IF_CUDA (y) {
    if (form) *activation = at::empty({y.size(0), columns / 2}, x.options());
    if (is_bf16(y) &&
      cuda::grouped_product(x.const_data_ptr(), form ? read<int32_t>(plan.row_of_slot) : nullptr,
        matrices.const_data_ptr(), matrices.is_contiguous(), read<int32_t>(plan.offsets),
        read(bias).pointer, y.mutable_data_ptr(), form ? activation->mutable_data_ptr() : nullptr,
        form ? *form : SwigluForm(), y.size(0), matrices.size(0), x.size(1), columns))
      return y;
  }
  const Tensor rows = form ? permute(x.detach(), plan) : x;
  if (rows.size(0) > 0 && grouped_mm_fits(rows, matrices))
    y = at::_grouped_mm(rows, matrices, plan.offsets);
  else
    for_each_expert(plan.offsets, [&](int64_t e, int64_t begin, int64_t count) {
      Tensor of_expert = y.narrow(0, begin, count);
      multiply_into(of_expert, rows.narrow(0, begin, count), matrices.select(0, e));
    });
  if (bias.defined()) {
    const Tensor slots = at::arange(y.size(0), plan.offsets.options());
    y.add_(bias.index_select(
      0, at::searchsorted(plan.offsets, slots, /*out_int32=*/true, /*right=*/true)));
  }
  if (form) *activation = swiglu_forward(y, *form);
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

// `weight` is (out, in), or, with a bias, (in, out). With `form` `given` are rows.
Tensor apply(const char* name, const Tensor& given, Parameter& weight, const Parameter* bias,
  const ExpertPlan& plan, const SwigluForm* form = nullptr) {
  check_shape(weight.value, weight.name, {plan.offsets.numel(), -1, -1});
  const Tensor turned = weight.value.transpose(1, 2);
  const Tensor matrices = bias ? weight.value : turned, backwards = bias ? turned : weight.value;
  check_tensor(given, name, weight.value.scalar_type(),
    {form ? plan.slot_of.size(0) : plan.num_slots(), matrices.size(1)});
  if (bias) check_shape(bias->value, bias->name, {matrices.size(0), matrices.size(2)});
  const Tensor kept = given.contiguous();
  Tensor activation;
  const Tensor y =
    multiply_grouped(kept, matrices, plan, bias ? bias->value : Tensor(), form, &activation);
  const bool trained = weight.value.requires_grad();
  const auto backward = [=, &weight](const Tensor& dy, bool permuted) {
    const Tensor x = permuted ? permute(kept.detach(), plan) : kept;
    Tensor dx = kept.requires_grad() ? multiply_grouped(dy, backwards, plan) : Tensor();
    if (permuted && dx.defined()) dx = sum_slots(dx, plan);
    if (trained && bias) add_bias_gradient(bias->grad, dy, plan);
    if (trained) add_or_defer({&weight, bias ? x : dy, bias ? dy : x, plan.offsets});
    return Tensors{dx, Tensor()};
  };
  if (!form)
    return record(
      y, {kept, weight.value}, [=](const Tensor& dy) { return backward(dy.contiguous(), false); });
  return record(activation, {kept, weight.value}, [=, form = *form](const Tensor& dactivation) {
    return backward(swiglu_backward(y, dactivation, form), true);
  });
}
}

Tensor grouped_linear(const Tensor& x, Parameter& weight, const ExpertPlan& plan) {
  return apply("grouped_linear: x", x, weight, nullptr, plan);
}
Tensor grouped_affine(
  const Tensor& x, Parameter& weight, const Parameter& bias, const ExpertPlan& plan) {
  return apply("grouped_affine: x", x, weight, &bias, plan);
}
Tensor permuted_swiglu(const Tensor& rows, Parameter& weight, const ExpertPlan& plan,
  const SwigluForm& form, const Parameter* bias) {
  PITH_CHECK(form.limit > 0 && weight.shape.at(bias ? 2 : 1) % 2 == 0,
    "permuted_swiglu: {}: a gate and an up each, a limit above 0", weight.name);
  return apply("permuted_swiglu: rows", rows, weight, bias, plan, &form);
}
}
