#include "operators/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>

#include "operators/function.h"

namespace pith {
namespace {

// x (T, heads, D) turned by the angles of its positions, or back. -> contiguous
Tensor rotate(const Tensor& x, const Tensor& positions, const RotaryTable& table, bool inverse) {
  PITH_IF_CUDA (x) {
    Tensor y = at::empty(x.sizes(), x.options());
    cuda::rotary(x.const_data_ptr(), positions.const_data_ptr<int32_t>(),
        table.cos.const_data_ptr<float>(), table.sin.const_data_ptr<float>(), y.mutable_data_ptr(),
        x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1), table.cos.size(0), inverse,
        is_bf16(x), current_stream());
    return y;
  }
  const int64_t half = x.size(2) / 2;
  const Tensor wide = widen(x), a = wide.narrow(2, 0, half), b = wide.narrow(2, half, half);
  const auto row = [&](const Tensor& angles) {  // (T, 1, D / 2)
    return angles.index_select(0, positions).unsqueeze(1).to(wide.scalar_type());
  };
  const Tensor cos = row(table.cos), sin = row(table.sin);
  const double sign = inverse ? -1 : 1;
  return at::cat({(a * cos).addcmul_(b, sin, -sign), (b * cos).addcmul_(a, sin, sign)}, 2)
      .to(x.scalar_type());
}

struct Rotary : torch::autograd::Function<Rotary> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& positions,
      const Tensor& cos, const Tensor& sin) {
    ctx->save_for_backward({positions, cos, sin});
    return rotate(x, positions, {cos, sin}, /*inverse=*/false);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor dy = grads[0].stride(2) == 1 ? grads[0] : grads[0].contiguous();
    return {
        rotate(dy, saved[0], {saved[1], saved[2]}, /*inverse=*/true), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

RotaryTable make_rotary_table(
    int64_t max_positions, int64_t head_dim, double theta, at::Device device) {
  PITH_CHECK(max_positions > 0 && head_dim > 0 && head_dim % 2 == 0 && theta > 0,
      "rotary table of {} positions, head size {}, theta {}", max_positions, head_dim, theta);
  const auto fp64 = at::TensorOptions(at::kDouble);
  const Tensor exponent = at::arange(0, head_dim, 2, fp64).div(static_cast<double>(-head_dim));
  const Tensor angle = at::outer(at::arange(max_positions, fp64), at::pow(theta, exponent));
  return {angle.cos().to(device, at::kFloat), angle.sin().to(device, at::kFloat)};
}

Tensor rotary(const Tensor& x, const Tensor& positions, const RotaryTable& table) {
  check_shape(x, "rotary: x", {-1, -1, -1});
  PITH_CHECK(x.is_floating_point() && x.size(2) % 2 == 0,
      "{}: floating-point heads of even size are needed", describe(x, "rotary: x"));
  PITH_CHECK(x.stride(2) == 1 || x.size(2) <= 1, "{}: the last dimension must be contiguous",
      describe(x, "rotary: x"));
  check_shape(positions, "rotary: positions", {x.size(0)});
  check_dtype(positions, "rotary: positions", at::kInt);
  check_shape(table.cos, "rotary: table.cos", {-1, x.size(2) / 2});
  check_shape(table.sin, "rotary: table.sin", {table.cos.size(0), x.size(2) / 2});
  check_dtype(table.cos, "rotary: table.cos", at::kFloat);
  check_dtype(table.sin, "rotary: table.sin", at::kFloat);
  check_ids(positions, "rotary: positions", table.cos.size(0));
  return Rotary::apply(x, positions.contiguous(), table.cos.contiguous(), table.sin.contiguous());
}

}  // namespace pith
