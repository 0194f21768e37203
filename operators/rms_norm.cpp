#include "operators/rms_norm.h"
#include "operators/function.h"

namespace pith {
namespace {
cuda::NormRows rows_of(const Tensor& x) {
  const int64_t dim = x.size(-1), count = dim == 0 ? 0 : x.numel() / dim;
  if (x.dim() == 3) return {count, dim, max<int64_t>(1, x.size(1)), x.stride(0), x.stride(1)};
  return {count, dim, 1, x.dim() == 2 ? x.stride(0) : dim, 0};
}

// Does rows_of describe x? Up to three dimensions, the last contiguous.
bool has_rows(const Tensor& x) { return x.is_contiguous() || (x.dim() <= 3 && x.stride(-1) == 1); }

// The factor is weight + plus. -> y, rstd = 1 / sqrt(mean(x^2) + eps) by row.
pair<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight, double eps, float plus) {
  const NoGradGuard no_grad;
  PITH_IF_CUDA (x) {
    Tensor y = at::empty(x.sizes(), x.options());
    Tensor rstd = at::empty(x.sizes().slice(0, x.sizes().size() - 1), x.options().dtype(kFloat));
    cuda::rms_norm_forward(
      read(x), rows_of(x), read(weight), plus, eps, write(y), write<float>(rstd));
    return {y, rstd};
  }
  const Tensor wide = widen(x), rstd = wide.square().mean(-1).add_(eps).rsqrt_();
  return {(wide * rstd.unsqueeze(-1)).mul_(widen(weight) + plus).to(x.scalar_type()), rstd};
}

// n = x rstd, g = dy (w + plus): dx = rstd (g - n mean(g n)); dweight, where defined, += sum dy n.
Tensor backward(const Tensor& x, const Tensor& rstd, const Tensor& weight, const Tensor& dy,
  Tensor dweight, float plus) {
  Tensor dx;
  PITH_IF_CUDA (x) {
    const cuda::NormRows rows = rows_of(x);
    if (x.requires_grad()) dx = at::empty(x.sizes(), x.options());
    Tensor partial = at::empty({cuda::rms_norm_blocks(rows), rows.dim}, rstd.options());
    cuda::rms_norm_backward(read(x), rows, read(weight), plus, read<float>(rstd),
      read(dy.contiguous()), write(dx), write<float>(partial), write<float>(dweight));
    return dx;
  }
  const Tensor scale = rstd.unsqueeze(-1), normal = widen(x) * scale, wide_dy = widen(dy);
  if (dweight.defined()) dweight.add_((wide_dy * normal).sum_to_size(dweight.sizes()));
  if (x.requires_grad()) {
    Tensor g = wide_dy * (widen(weight) + plus);
    const Tensor mean = (g * normal).mean(-1, /*keepdim=*/true);
    dx = g.addcmul_(normal, mean, -1).mul_(scale).to(x.scalar_type());
  }
  return dx;
}
}

Tensor rms_norm(const Tensor& given, Parameter& weight, double eps, bool zero_centred) {
  check_shape(weight.value, weight.name, {-1});
  PITH_CHECK(given.defined() && given.dim() > 0 && given.size(-1) == weight.value.size(0),
    "{}; its last dimension should be {} as in {}", describe(given, "rms_norm: x"),
    weight.value.size(0), weight.name);
  check_dtype(given, "rms_norm: input of " + weight.name, weight.value.scalar_type());
  const Tensor x = has_rows(given) ? given : given.contiguous();
  const float plus = zero_centred ? 1 : 0;
  const auto [y, rstd] = forward(x, weight.value, eps, plus);
  return record(y, {x, weight.value},
    [x, rstd = rstd, &weight, plus, trained = weight.value.requires_grad()](const Tensor& dy) {
    return Tensors{
      backward(x, rstd, weight.value, dy, trained ? weight.grad : Tensor(), plus), Tensor()};
  });
}
}
