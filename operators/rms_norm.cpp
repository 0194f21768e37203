#include "operators/rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "operators/function.h"

namespace pith {
namespace {

cuda::NormRows rows_of(const Tensor& x) {
  const int64_t dim = x.size(-1), count = dim == 0 ? 0 : x.numel() / dim;
  if (x.dim() == 3) return {count, dim, std::max<int64_t>(1, x.size(1)), x.stride(0), x.stride(1)};
  return {count, dim, 1, x.dim() == 2 ? x.stride(0) : dim, 0};
}

// Whether rows_of describes x: up to three dimensions, the last one contiguous.
bool has_rows(const Tensor& x) { return x.is_contiguous() || (x.dim() <= 3 && x.stride(-1) == 1); }

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static Tensor forward(
      AutogradContext* ctx, const Tensor& x, const Tensor& value, Parameter* weight, double eps) {
    Tensor y, rstd;
    PITH_IF_CUDA (x) {
      const auto leading = x.sizes().slice(0, static_cast<size_t>(x.dim() - 1));
      y = at::empty(x.sizes(), x.options());
      rstd = at::empty(leading, x.options().dtype(at::kFloat));
      cuda::rms_norm_forward(x.const_data_ptr(), rows_of(x), value.const_data_ptr(), eps,
          y.mutable_data_ptr(), rstd.mutable_data_ptr<float>(), is_bf16(x), current_stream());
    }
    if (!y.defined()) {
      const Tensor wide = widen(x);
      rstd = wide.square().mean(-1).add_(eps).rsqrt_();
      y = (wide * rstd.unsqueeze(-1)).mul_(widen(value)).to(x.scalar_type());
    }
    ctx->save_for_backward({x, rstd});
    ctx->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    return y;
  }

  // With n = x rstd and g = dy w: dx = rstd (g - n mean(g n)), dw += sum over rows of dy n.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &rstd = saved[1];
    auto* weight = reinterpret_cast<Parameter*>(ctx->saved_data["weight"].toInt());
    Tensor dx, dweight = ctx->needs_input_grad(1) ? weight->grad : Tensor();
    PITH_IF_CUDA (x) {
      const cuda::NormRows rows = rows_of(x);
      const Tensor dy = grads[0].contiguous();
      if (ctx->needs_input_grad(0)) dx = at::empty(x.sizes(), x.options());
      Tensor partial = at::empty({cuda::rms_norm_blocks(rows), rows.dim}, rstd.options());
      cuda::rms_norm_backward(x.const_data_ptr(), rows, weight->value.const_data_ptr(),
          rstd.const_data_ptr<float>(), dy.const_data_ptr(),
          dx.defined() ? dx.mutable_data_ptr() : nullptr, partial.mutable_data_ptr<float>(),
          dweight.defined() ? dweight.mutable_data_ptr<float>() : nullptr, is_bf16(x),
          current_stream());
      return {dx, Tensor(), Tensor(), Tensor()};
    }
    const Tensor scale = rstd.unsqueeze(-1), normal = widen(x) * scale, dy = widen(grads[0]);
    if (dweight.defined()) dweight.add_((dy * normal).sum_to_size(dweight.sizes()));
    if (ctx->needs_input_grad(0)) {
      Tensor g = dy * widen(weight->value);
      const Tensor mean = (g * normal).mean(-1, /*keepdim=*/true);
      dx = g.addcmul_(normal, mean, -1).mul_(scale).to(x.scalar_type());
    }
    return {dx, Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor rms_norm(const Tensor& x, Parameter& weight, double eps) {
  check_shape(weight.value, weight.name, {-1});
  PITH_CHECK(x.defined() && x.dim() > 0 && x.size(-1) == weight.value.size(0),
      "{}; its last dimension should be {} as in {}", describe(x, "rms_norm: x"),
      weight.value.size(0), weight.name);
  check_dtype(x, "rms_norm: input of " + weight.name, weight.value.scalar_type());
  return RmsNorm::apply(has_rows(x) ? x : x.contiguous(), weight.value, &weight, eps);
}

}  // namespace pith
