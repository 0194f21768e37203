#include "operators/rotary.h"

#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>

#include "operators/function.h"

namespace pith {
namespace {

// x (T, heads, D) turned by the angles of its positions, or back. -> contiguous
Tensor rotate(const Tensor& x, const Tensor& positions, const RotaryTable& table, bool inverse) {
  const at::NoGradGuard no_grad;
  PITH_IF_CUDA (x) {
    Tensor y = at::empty(x.sizes(), x.options());
    cuda::rotary(read(x), read<int32_t>(positions), read<float>(table.cos), read<float>(table.sin),
        write(y), x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1), table.cos.size(0),
        inverse, is_bf16(x), current_stream());
    return y;
  }
  const Tensor wide = widen(x);
  const auto row = [&](const Tensor& angles) {  // (T, 1, D / 2)
    return angles.index_select(0, positions).unsqueeze(1).to(wide.scalar_type());
  };
  const Tensor cos = row(table.cos), sin = row(table.sin);
  const auto halves = wide.chunk(2, 2);
  const Tensor &a = halves[0], &b = halves[1];
  const double sign = inverse ? -1 : 1;
  return at::cat({(a * cos).addcmul_(b, sin, -sign), (b * cos).addcmul_(a, sin, sign)}, 2)
      .to(x.scalar_type());
}

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
  PITH_CHECK(x.is_floating_point() && x.size(2) % 2 == 0 && (x.stride(2) == 1 || x.size(2) <= 1),
      "{}: floating-point heads of even size, contiguous each, are needed",
      describe(x, "rotary: x"));
  check_tensor(positions, "rotary: positions", at::kInt, {x.size(0)});
  check_shape(table.cos, "rotary: table.cos", {-1, x.size(2) / 2});
  check_ids(positions, "rotary: positions", table.cos.size(0));
  const Tensor turned_by = positions.contiguous();
  return record(
      rotate(x, turned_by, table, /*inverse=*/false), {x}, [turned_by, table](const Tensor& given) {
        const Tensor dy = given.stride(2) == 1 ? given : given.contiguous();
        return Tensors{rotate(dy, turned_by, table, /*inverse=*/true)};
      });
}

}  // namespace pith
