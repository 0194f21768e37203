#include "operators/swiglu.h"

#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/stack.h>

#include "operators/function.h"

namespace pith {
namespace {

using cuda::SwigluClamp;

Tensor forward(const Tensor& gate_up, const SwigluClamp& clamp) {
  const at::NoGradGuard no_grad;
  PITH_IF_CUDA (gate_up) {
    Tensor y = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
    cuda::swiglu_forward(
        read(gate_up), write(y), y.size(0), y.size(1), clamp, is_bf16(y), current_stream());
    return y;
  }
  const Tensor wide = widen(gate_up);
  if (clamp.limit > 0) {
    const Tensor gate = wide.slice(1, 0, {}, 2).clamp_max(clamp.limit);
    const Tensor up = wide.slice(1, 1, {}, 2).clamp(-clamp.limit, clamp.limit);
    return at::sigmoid(gate * clamp.alpha).mul_(gate).mul_(up + 1).to(gate_up.scalar_type());
  }
  const auto parts = wide.chunk(2, 1);
  return at::silu(parts[0]).mul_(parts[1]).to(gate_up.scalar_type());
}

Tensor backward(const Tensor& gate_up, const Tensor& given, const SwigluClamp& clamp) {
  PITH_IF_CUDA (gate_up) {
    const Tensor dy = given.contiguous();
    Tensor dgate_up = at::empty_like(gate_up);
    cuda::swiglu_backward(read(gate_up), read(dy), write(dgate_up), dy.size(0), dy.size(1), clamp,
        is_bf16(dy), current_stream());
    return dgate_up;
  }
  const Tensor wide = widen(gate_up), dy = widen(given);
  if (clamp.limit > 0) {
    const Tensor gate = wide.slice(1, 0, {}, 2), up = wide.slice(1, 1, {}, 2);
    const Tensor g = gate.clamp_max(clamp.limit), u = up.clamp(-clamp.limit, clamp.limit);
    const Tensor s = at::sigmoid(g * clamp.alpha);
    const Tensor dgate = dy * (u + 1) * s * (g * clamp.alpha * (1 - s) + 1);
    return at::stack({dgate.masked_fill(gate > clamp.limit, 0),
                         (dy * g * s).masked_fill(up.abs() > clamp.limit, 0)},
        2)
        .flatten(1)
        .to(gate_up.scalar_type());
  }
  const auto parts = wide.chunk(2, 1);
  const Tensor &gate = parts[0], &up = parts[1];
  return at::cat({at::silu_backward(dy * up, gate), at::silu(gate).mul_(dy)}, 1)
      .to(gate_up.scalar_type());
}

Tensor apply(const Tensor& gate_up, const SwigluClamp& clamp) {
  check_shape(gate_up, "swiglu: gate_up", {-1, -1});
  PITH_CHECK(gate_up.is_floating_point() && gate_up.size(1) % 2 == 0,
      "{}: gate and up must be floating-point numbers, as many of the one as of the other",
      describe(gate_up, "swiglu: gate_up"));
  const Tensor x = gate_up.contiguous();
  return record(forward(x, clamp), {x},
      [x, clamp](const Tensor& dy) { return Tensors{backward(x, dy, clamp)}; });
}

}  // namespace

Tensor swiglu(const Tensor& gate_up) { return apply(gate_up, {}); }

Tensor clamped_swiglu(const Tensor& gate_up, double alpha, double limit) {
  PITH_CHECK(limit > 0, "clamped_swiglu: limit {}", limit);
  return apply(gate_up, {static_cast<float>(alpha), static_cast<float>(limit)});
}

}  // namespace pith
