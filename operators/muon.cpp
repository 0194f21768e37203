#include "operators/muon.h"
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include "operators/matmul.h"

namespace pith {
// ATen's operations on elements round once each, wherever a part of the buffers begins.
void muon_momentum(Tensor& exp_avg, const Tensor& grad, const Tensor& grad_scale, double momentum,
  Tensor direction) {
  check_tensor(exp_avg, "muon: exp_avg", exp_avg.scalar_type(), {grad.size(0)});
  check_tensor(direction, "muon: direction", direction.scalar_type(), {grad.size(0)});
  const NoGradGuard no_grad;
  const Tensor scaled = grad * grad_scale;
  Tensor wide = (widen(exp_avg) * momentum).add_(scaled);
  exp_avg.copy_(wide);
  direction.copy_(wide.mul_(momentum).add_(scaled));
}

Tensor newton_schulz(const Tensor& x, double scale) {
  check_shape(x, "newton_schulz: x", {-1, -1, -1});
  PITH_CHECK(x.size(1) <= x.size(2), "{} should be given transposed, the smaller side first",
    describe(x, "newton_schulz: x"));
  const NoGradGuard no_grad;
  const auto dtype = x.scalar_type();
  // LibTorch's BF16 products on CPUs may round in between.
  const bool wide = !x.is_cuda() && dtype == kBFloat16;
  const auto operand = [&](const Tensor& a) { return wide ? a.to(kFloat) : a; };
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  const Tensor norm = widen(x).flatten(1).norm(2, {1}).add_(1e-7).view({-1, 1, 1});
  Tensor y = (widen(x) / norm).to(dtype);
  for (int step = 1; step <= 5; ++step) {
    const double factor = step == 5 ? scale : 1;
    const Tensor rows = operand(y);
    const Tensor gram = operand(at::bmm(rows, rows.transpose(1, 2)).to(dtype));
    const Tensor poly = operand(at::baddbmm(gram, gram, gram, kB, kC).to(dtype));
    y = at::baddbmm(rows, poly, rows, kA * factor, factor).to(dtype);
  }
  return y;
}

void muon_update(
  Tensor& master, const Tensor& update, Tensor& value, double rate, double weight_decay) {
  check_tensor(update, "muon: update", update.scalar_type(), {master.size(0)});
  const NoGradGuard no_grad;
  master.sub_(master * (rate * weight_decay)).sub_(widen(update) * rate);
  value.copy_(master);
}
}
