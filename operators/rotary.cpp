#include "operators/rotary.h"
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include "operators/function.h"

namespace pith {
namespace {
// x (T, heads, ..) turned by its positions' angles, or back; contiguous.
Tensor rotate(const Tensor& x, const Tensor& positions, const RotaryTable& table, RotaryPairs pairs,
  int64_t first, bool inverse) {
  const NoGradGuard no_grad;
  const bool neighbours = pairs == RotaryPairs::neighbours;
  const int64_t dim = 2 * table.cos.size(1), rest = first + dim;
  const Tensor turned = x.narrow(2, first, dim);
  const Tensor before = x.narrow(2, 0, first), after = x.narrow(2, rest, x.size(2) - rest);
  PITH_IF_CUDA (x) {
    Tensor y = at::empty(x.sizes(), x.options());
    if (first > 0) y.narrow(2, 0, first).copy_(before);
    if (after.size(2) > 0) y.narrow(2, rest, after.size(2)).copy_(after);
    cuda::rotary(read(turned), read<int32_t>(positions), read<float>(table.cos),
      read<float>(table.sin), write(y.narrow(2, first, dim)), x.size(0), x.size(1), dim,
      x.stride(0), x.stride(1), x.size(2), table.cos.size(0), neighbours, inverse);
    return y;
  }
  const Tensor wide = widen(turned);
  const auto row = [&](const Tensor& angles) { // (T, 1, D / 2)
    return angles.index_select(0, positions).unsqueeze(1).to(wide.scalar_type());
  };
  const Tensor cos = row(table.cos), sin = row(table.sin);
  const auto parts = neighbours ? wide.unflatten(2, {-1, 2}).unbind(3) : wide.chunk(2, 2);
  const Tensor &a = parts[0], &b = parts[1];
  const double sign = inverse ? -1 : 1;
  const Tensors out{(a * cos).addcmul_(b, sin, -sign), (b * cos).addcmul_(a, sin, sign)};
  const Tensor y =
    (neighbours ? at::stack(out, 3).flatten(2) : at::cat(out, 2)).to(x.scalar_type());
  return dim == x.size(2) ? y : at::cat({before, y, after}, 2);
}

// The frequency (real) that turns `turns` times over the original positions.
double frequency_of(double turns, int64_t head_dim, double theta, const Yarn& yarn) {
  return real(head_dim) * std::log(yarn.original_positions / (turns * 2 * std::numbers::pi)) /
    (2 * std::log(theta));
}
}

RotaryTable make_rotary_table(
  int64_t max_positions, int64_t head_dim, double theta, Device device, const Yarn& yarn) {
  PITH_CHECK(max_positions > 0 && head_dim > 0 && head_dim % 2 == 0 && theta > 0,
    "rotary table of {} positions, head size {}, theta {}", max_positions, head_dim, theta);
  const auto fp64 = TensorOptions(kDouble);
  const Tensor exponent = at::arange(0, head_dim, 2, fp64).div(real(-head_dim));
  Tensor frequency = at::pow(theta, exponent);
  if (yarn.factor != 1) {
    double low = frequency_of(yarn.beta_fast, head_dim, theta, yarn);
    double high = frequency_of(yarn.beta_slow, head_dim, theta, yarn);
    if (yarn.truncate) low = std::floor(low), high = std::ceil(high);
    low = max(low, 0.0), high = min(high, real(head_dim - 1));
    if (low == high) high += 0.001;
    const Tensor stretched =
      at::arange(head_dim / 2, fp64).sub(low).div(high - low).clamp(0, 1); // share
    frequency.mul_(stretched.mul(1 / yarn.factor - 1).add(1));
  }
  const Tensor angle = at::outer(at::arange(max_positions, fp64), frequency);
  return {(angle.cos() * yarn.magnitude).to(device, kFloat),
    (angle.sin() * yarn.magnitude).to(device, kFloat)};
}

Tensor rotary(const Tensor& x, const Tensor& positions, const RotaryTable& table, RotaryPairs pairs,
  int64_t first) {
  check_shape(x, "rotary: x", {-1, -1, -1});
  PITH_CHECK(x.is_floating_point() && x.size(2) >= first + 2 * table.cos.size(1) &&
      (x.stride(2) == 1 || x.size(2) <= 1),
    "{}: floating-point heads of {} elements or more, contiguous each, are needed",
    describe(x, "rotary: x"), first + 2 * table.cos.size(1));
  check_tensor(positions, "rotary: positions", kInt, {x.size(0)});
  check_ids(positions, "rotary: positions", table.cos.size(0));
  const Tensor turned_by = positions.contiguous();
  return record(
    rotate(x, turned_by, table, pairs, first, /*inverse=*/false), {x}, [=](const Tensor& given) {
    const Tensor dy = given.stride(2) == 1 ? given : given.contiguous();
    return Tensors{rotate(dy, turned_by, table, pairs, first, /*inverse=*/true)};
  });
}
}
