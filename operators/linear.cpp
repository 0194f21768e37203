#include "operators/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include "operators/matmul.h"

namespace pith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// a b in wide_dtype.
Tensor mm_wide(const Tensor& a, const Tensor& b) {
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(wide_dtype(a.scalar_type())));
  mm_wide_out(out, a, b);
  return out;
}

// a b in the operands' dtype, summed in FP32 and rounded once, on either device.
Tensor mm_rounded(const Tensor& a, const Tensor& b) {
  if (a.is_cpu() && a.scalar_type() == at::kBFloat16) return mm_wide(a, b).to(at::kBFloat16);
  return at::mm(a, b);
}

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& value,
                        Parameter* weight) {
    if (value.requires_grad()) ctx->save_for_backward({x});
    ctx->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    return mm_rounded(x, value.t());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    auto* weight = reinterpret_cast<Parameter*>(ctx->saved_data["weight"].toInt());
    const Tensor& dy = grads[0];  // (T, out)
    Tensor dx;
    if (ctx->needs_input_grad(0)) dx = mm_rounded(dy, weight->value);
    if (ctx->needs_input_grad(1)) add_or_defer({weight, dy, ctx->get_saved_variables()[0], {}});
    return {dx, Tensor(), Tensor()};
  }
};

struct LinearFp32 : torch::autograd::Function<LinearFp32> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& value,
                        Parameter* weight) {
    if (value.requires_grad()) ctx->save_for_backward({x});
    ctx->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    return mm_wide(x, value.t());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    auto* weight = reinterpret_cast<Parameter*>(ctx->saved_data["weight"].toInt());
    const Tensor dy = grads[0].contiguous();  // (T, out) FP32
    const Tensor& value = weight->value;      // (out, in)
    const Tensor x = ctx->needs_input_grad(1) ? ctx->get_saved_variables()[0] : Tensor();
    Tensor dx;
#if PITH_CUDA
    if (dy.is_cuda() && value.scalar_type() == at::kBFloat16) {
      // dy is exactly the sum of three BF16 numbers (3 x 8 bits of significand), and x and W are
      // BF16: one product on tensor cores with three times the columns has the precision of FP32.
      const int64_t tokens = dy.size(0), out = value.size(0), in = value.size(1);
      Tensor parts = at::empty({tokens, 3 * out}, value.options());
      cuda::split_bf16x3(dy.const_data_ptr<float>(), parts.mutable_data_ptr(), tokens, out,
                         c10::cuda::getCurrentCUDAStream());
      if (ctx->needs_input_grad(0)) dx = at::mm(parts, value.repeat({3, 1}));
      if (ctx->needs_input_grad(1) && tokens > 0) {
        weight->grad.add_(mm_wide(parts.t(), x).view({3, out, in}).sum(0));
      }
      return {dx, Tensor(), Tensor()};
    }
#endif
    if (ctx->needs_input_grad(0)) {
      dx = at::mm(dy, value.to(dy.scalar_type())).to(value.scalar_type());
    }
    if (ctx->needs_input_grad(1)) {
      add_weight_gradient(weight->grad, dy, x.to(dy.scalar_type()));
    }
    return {dx, Tensor(), Tensor()};
  }
};

void check_arguments(const Tensor& x, const Parameter& weight) {
  check_shape(weight.value, weight.name, {-1, -1});
  check_shape(x, "linear: input of " + weight.name, {-1, weight.value.size(1)});
  check_dtype(x, "linear: input of " + weight.name, weight.value.scalar_type());
}

}  // namespace

Tensor linear(const Tensor& x, Parameter& weight) {
  check_arguments(x, weight);
  return Linear::apply(x, weight.value, &weight);
}

Tensor linear_fp32(const Tensor& x, Parameter& weight) {
  check_arguments(x, weight);
  return LinearFp32::apply(x, weight.value, &weight);
}

}  // namespace pith
