#include "operators/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "operators/function.h"

namespace pith {
namespace {

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(
      AutogradContext* ctx, const Tensor& x, const Tensor& value, Parameter* weight, bool wide) {
    if (value.requires_grad()) ctx->save_for_backward({x});
    ctx->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    return wide ? mm_wide(x, value.t()) : mm_rounded(x, value.t());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    auto* weight = reinterpret_cast<Parameter*>(ctx->saved_data["weight"].toInt());
    const Tensor& value = weight->value;  // (out, in)
    const bool weight_gradient = ctx->needs_input_grad(1);
    const Tensor x = weight_gradient ? ctx->get_saved_variables()[0] : Tensor();
    Tensor dx, dy = grads[0];  // (T, out)
    if (dy.scalar_type() == value.scalar_type()) {
      if (ctx->needs_input_grad(0)) dx = mm_rounded(dy, value);
      if (weight_gradient) add_or_defer({weight, dy, x, {}, {}});
      return {dx, Tensor(), Tensor(), Tensor()};
    }
    // From here on dy is FP32, x and W are BF16.
    PITH_IF_CUDA (dy) {
      // dy is exactly the sum of three BF16 numbers (3 x 8 bits of significand): one product on
      // tensor cores with three times the columns has the precision of FP32.
      dy = dy.contiguous();
      const int64_t tokens = dy.size(0), out = value.size(0), in = value.size(1);
      Tensor parts = at::empty({tokens, 3 * out}, value.options());
      cuda::split_bf16x3(
          dy.const_data_ptr<float>(), parts.mutable_data_ptr(), tokens, out, current_stream());
      if (ctx->needs_input_grad(0)) dx = at::mm(parts, value.repeat({3, 1}));
      if (weight_gradient && tokens > 0) {
        weight->grad.add_(mm_wide(parts.t(), x).view({3, out, in}).sum(0));
      }
      return {dx, Tensor(), Tensor(), Tensor()};
    }
    if (ctx->needs_input_grad(0)) dx = at::mm(dy, widen(value)).to(value.scalar_type());
    if (weight_gradient) add_weight_gradient(weight->grad, dy, x);
    return {dx, Tensor(), Tensor(), Tensor()};
  }
};

Tensor apply(const Tensor& x, Parameter& weight, bool wide) {
  check_shape(weight.value, weight.name, {-1, -1});
  check_shape(x, "linear: input of " + weight.name, {-1, weight.value.size(1)});
  check_dtype(x, "linear: input of " + weight.name, weight.value.scalar_type());
  return Linear::apply(x, weight.value, &weight, wide);
}

}  // namespace

Tensor linear(const Tensor& x, Parameter& weight) { return apply(x, weight, /*wide=*/false); }
Tensor linear_fp32(const Tensor& x, Parameter& weight) { return apply(x, weight, /*wide=*/true); }

}  // namespace pith
