#include "operators/swiglu.h"

#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include "operators/function.h"

namespace pith {
namespace {

Tensor forward(const Tensor& gate_up) {
  const at::NoGradGuard no_grad;
  PITH_IF_CUDA (gate_up) {
    Tensor y = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
    cuda::swiglu_forward(
        read(gate_up), write(y), y.size(0), y.size(1), is_bf16(y), current_stream());
    return y;
  }
  const auto parts = widen(gate_up).chunk(2, 1);
  return at::silu(parts[0]).mul_(parts[1]).to(gate_up.scalar_type());
}

Tensor backward(const Tensor& gate_up, const Tensor& given) {
  PITH_IF_CUDA (gate_up) {
    const Tensor dy = given.contiguous();
    Tensor dgate_up = at::empty_like(gate_up);
    cuda::swiglu_backward(read(gate_up), read(dy), write(dgate_up), dy.size(0), dy.size(1),
        is_bf16(dy), current_stream());
    return dgate_up;
  }
  const auto parts = widen(gate_up).chunk(2, 1);
  const Tensor &gate = parts[0], &up = parts[1], dy = widen(given);
  return at::cat({at::silu_backward(dy * up, gate), at::silu(gate).mul_(dy)}, 1)
      .to(gate_up.scalar_type());
}

}  // namespace

Tensor swiglu(const Tensor& gate_up) {
  check_shape(gate_up, "swiglu: gate_up", {-1, -1});
  PITH_CHECK(gate_up.is_floating_point() && gate_up.size(1) % 2 == 0,
      "{}: gate and up must be floating-point numbers, as many of the one as of the other",
      describe(gate_up, "swiglu: gate_up"));
  const Tensor x = gate_up.contiguous();
  return record(forward(x), {x}, [x](const Tensor& dy) { return Tensors{backward(x, dy)}; });
}

}  // namespace pith
