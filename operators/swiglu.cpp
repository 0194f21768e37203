#include "operators/swiglu.h"
#include "operators/function.h"

namespace pith {
namespace {
array<Tensor, 2> halves(const Tensor& gate_up, const SwigluForm& form) {
  if (form.alternating) return {gate_up.slice(1, 0, {}, 2), gate_up.slice(1, 1, {}, 2)};
  const int64_t width = gate_up.size(1) / 2;
  return {gate_up.narrow(1, 0, width), gate_up.narrow(1, width, width)};
}

}

Tensor swiglu_forward(const Tensor& gate_up, const SwigluForm& form) {
  const NoGradGuard no_grad;
  PITH_IF_CUDA (gate_up) {
    Tensor y = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
    cuda::swiglu(read(gate_up), {}, write(y), y.size(0), y.size(1), form);
    return y;
  }
  const auto [gate, up] = halves(widen(gate_up), form);
  const Tensor g = gate.clamp_max(form.limit), u = up.clamp(-form.limit, form.limit) + form.plus;
  return at::sigmoid(g * form.alpha).mul_(g).mul_(u).to(gate_up.scalar_type());
}

Tensor swiglu_backward(const Tensor& gate_up, const Tensor& given, const SwigluForm& form) {
  PITH_IF_CUDA (gate_up) {
    const Tensor dy = given.contiguous();
    Tensor dgate_up = at::empty_like(gate_up);
    cuda::swiglu(read(gate_up), read(dy), write(dgate_up), dy.size(0), dy.size(1), form);
    return dgate_up;
  }
  const Tensor wide = widen(gate_up), dy = widen(given), dgate_up = at::empty_like(wide);
  const auto [gate, up] = halves(wide, form);
  const auto [dgate, dup] = halves(dgate_up, form);
  const Tensor g = gate.clamp_max(form.limit), u = up.clamp(-form.limit, form.limit) + form.plus;
  const Tensor s = at::sigmoid(g * form.alpha);
  dup.copy_(dy * g * s).masked_fill_(up.abs() > form.limit, 0);
  dgate.copy_(dy * u * s * (g * form.alpha * (1 - s) + 1)).masked_fill_(gate > form.limit, 0);
  return dgate_up.to(gate_up.scalar_type());
}

Tensor swiglu(const Tensor& gate_up, const SwigluForm& form) {
  check_shape(gate_up, "swiglu: gate_up", {-1, -1});
  PITH_CHECK(gate_up.is_floating_point() && gate_up.size(1) % 2 == 0,
    "{}: gate and up must be floating-point numbers, as many of the one as of the other",
    describe(gate_up, "swiglu: gate_up"));
  PITH_CHECK(form.limit > 0, "swiglu: limit {}", form.limit);
  const Tensor x = gate_up.contiguous();
  return record(swiglu_forward(x, form), {x},
    [x, form](const Tensor& dy) { return Tensors{swiglu_backward(x, dy, form)}; });
}
}
