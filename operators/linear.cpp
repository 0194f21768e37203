#include "operators/linear.h"
#include "operators/function.h"

namespace pith {
namespace {
// dy (T, out) -> dx, where needed; x (T, in), where defined, for the weight's gradient.
Tensor backward(const Tensor& x, Parameter& weight, const Tensor& dy, bool needs_dx) {
  const Tensor& value = weight.value; // (out, in)
  Tensor dx;
  if (dy.scalar_type() == value.scalar_type()) {
    if (needs_dx) dx = multiply(dy, value, dy.scalar_type());
    if (x.defined()) add_or_defer({&weight, dy, x, {}});
    return dx;
  }
  // From here on dy is FP32, x and W are BF16.
  PITH_IF_CUDA (dy) {
    // dy is exactly the sum of three BF16 numbers (3 x 8 bits of significand): one product on
    // tensor cores with three times the columns has FP32's precision.
    const int64_t out = value.size(0), in = value.size(1);
    const Tensor first = dy.to(kBFloat16), rest = dy - first, second = rest.to(kBFloat16);
    const Tensor parts = at::cat({first, second, (rest - second).to(kBFloat16)}, 1);
    if (needs_dx) dx = at::mm(parts, value.repeat({3, 1}));
    if (x.defined() && dy.size(0) > 0)
      weight.grad.add_(multiply(parts.t(), x, kFloat).view({3, out, in}).sum(0));
    return dx;
  }
  if (needs_dx) dx = at::mm(dy, widen(value)).to(value.scalar_type());
  if (x.defined()) add_weight_gradient(weight.grad, dy, x);
  return dx;
}

Tensor product(const Tensor& x, const Parameter& weight, const Parameter* bias, ScalarType dtype) {
  const NoGradGuard no_grad;
  const Tensor transposed = weight.value.t();
  if (!bias) return multiply(x, transposed, dtype);
  if (x.is_cuda() && dtype == x.scalar_type()) return at::addmm(bias->value, x, transposed);
  return multiply(x, transposed, wide_dtype(dtype)).add_(bias->value).to(dtype);
}

Tensor apply(const Tensor& x, Parameter& weight, const Parameter* bias, ScalarType dtype) {
  check_shape(weight.value, weight.name, {-1, -1});
  check_tensor(
    x, "linear: input of " + weight.name, weight.value.scalar_type(), {-1, weight.value.size(1)});
  if (bias) check_shape(bias->value, bias->name, {weight.value.size(0)});
  const Tensor kept = weight.value.requires_grad() ? x : Tensor();
  return record(product(x, weight, bias, dtype), {x, weight.value},
    [kept, &weight, bias, needs_dx = x.requires_grad()](const Tensor& dy) {
    if (bias && kept.defined())
      bias->grad.add_(dy.sum(0, /*keepdim=*/false, bias->grad.scalar_type()));
    return Tensors{backward(kept, weight, dy, needs_dx), Tensor()};
  });
}
}

Tensor linear(const Tensor& x, Parameter& weight, const Parameter* bias) {
  return apply(x, weight, bias, x.scalar_type());
}
Tensor linear_fp32(const Tensor& x, Parameter& weight, const Parameter* bias) {
  return apply(x, weight, bias, wide_dtype(x.scalar_type()));
}
}
