#include "operators/swiglu.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include "operators/function.h"

namespace pith {
namespace {

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate_up) {
    ctx->save_for_backward({gate_up});
    const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
    PITH_IF_CUDA (gate_up) {
      Tensor y = at::empty({rows, width}, gate_up.options());
      cuda::swiglu_forward(gate_up.const_data_ptr(), y.mutable_data_ptr(), rows, width, is_bf16(y),
          current_stream());
      return y;
    }
    const Tensor wide = widen(gate_up);
    Tensor y = at::silu(wide.narrow(1, 0, width)).mul_(wide.narrow(1, width, width));
    return y.to(gate_up.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    const Tensor gate_up = ctx->get_saved_variables()[0];
    const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
    PITH_IF_CUDA (gate_up) {
      const Tensor dy = grads[0].contiguous();
      Tensor dgate_up = at::empty_like(gate_up);
      cuda::swiglu_backward(gate_up.const_data_ptr(), dy.const_data_ptr(),
          dgate_up.mutable_data_ptr(), rows, width, is_bf16(dy), current_stream());
      return {dgate_up};
    }
    const Tensor wide = widen(gate_up), dy = widen(grads[0]);
    const Tensor gate = wide.narrow(1, 0, width), up = wide.narrow(1, width, width);
    const Tensor dgate = at::silu_backward(dy * up, gate), dup = at::silu(gate).mul_(dy);
    return {at::cat({dgate, dup}, 1).to(gate_up.scalar_type())};
  }
};

}  // namespace

Tensor swiglu(const Tensor& gate_up) {
  check_shape(gate_up, "swiglu: gate_up", {-1, -1});
  PITH_CHECK(gate_up.is_floating_point() && gate_up.size(1) % 2 == 0,
      "{}: gate and up must be floating-point numbers, as many of the one as of the other",
      describe(gate_up, "swiglu: gate_up"));
  return SwiGlu::apply(gate_up.contiguous());
}

}  // namespace pith
