#include "operators/swiglu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <cmath>

#include "operators/dispatch.h"

namespace pith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kElementsPerTask = 1 << 13;

template <class T>
void forward_cpu(const Tensor& gate_up, Tensor& y) {
  const int64_t rows = y.size(0), width = y.size(1);
  const T* in = gate_up.const_data_ptr<T>();
  T* out = y.mutable_data_ptr<T>();
  at::parallel_for(0, rows, 1 + kElementsPerTask / width, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const T *gate = in + 2 * s * width, *up = gate + width;
      for (int64_t i = 0; i < width; ++i) {
        const Wide<T> g = static_cast<Wide<T>>(gate[i]), u = static_cast<Wide<T>>(up[i]);
        out[s * width + i] = static_cast<T>(g / (1 + std::exp(-g)) * u);
      }
    }
  });
}

template <class T>
void backward_cpu(const Tensor& gate_up, const Tensor& dy, Tensor& dgate_up) {
  const int64_t rows = dy.size(0), width = dy.size(1);
  const T *in = gate_up.const_data_ptr<T>(), *dout = dy.const_data_ptr<T>();
  T* din = dgate_up.mutable_data_ptr<T>();
  at::parallel_for(0, rows, 1 + kElementsPerTask / width, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const T *gate = in + 2 * s * width, *up = gate + width;
      T *dgate = din + 2 * s * width, *dup = dgate + width;
      for (int64_t i = 0; i < width; ++i) {
        const Wide<T> g = static_cast<Wide<T>>(gate[i]), u = static_cast<Wide<T>>(up[i]);
        const Wide<T> d = static_cast<Wide<T>>(dout[s * width + i]);
        const Wide<T> sigmoid = 1 / (1 + std::exp(-g));
        dgate[i] = static_cast<T>(d * u * sigmoid * (1 + g * (1 - sigmoid)));
        dup[i] = static_cast<T>(d * g * sigmoid);
      }
    }
  });
}

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate_up) {
    ctx->save_for_backward({gate_up});
    Tensor y = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
    if (y.numel() == 0) return y;
#if PITH_CUDA
    if (has_kernel(gate_up)) {
      cuda::swiglu_forward(gate_up.const_data_ptr(), y.mutable_data_ptr(), y.size(0), y.size(1),
                           y.scalar_type() == at::kBFloat16, c10::cuda::getCurrentCUDAStream());
      return y;
    }
#endif
    dispatch_float(gate_up, "swiglu: gate_up",
                   [&](auto type) { forward_cpu<decltype(type)>(gate_up, y); });
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    const Tensor gate_up = ctx->get_saved_variables()[0];
    const Tensor dy = grads[0].contiguous();
    Tensor dgate_up = at::empty_like(gate_up);
    if (dy.numel() == 0) return {dgate_up};
#if PITH_CUDA
    if (has_kernel(gate_up)) {
      cuda::swiglu_backward(gate_up.const_data_ptr(), dy.const_data_ptr(),
                            dgate_up.mutable_data_ptr(), dy.size(0), dy.size(1),
                            dy.scalar_type() == at::kBFloat16, c10::cuda::getCurrentCUDAStream());
      return {dgate_up};
    }
#endif
    dispatch_float(gate_up, "swiglu: gate_up",
                   [&](auto type) { backward_cpu<decltype(type)>(gate_up, dy, dgate_up); });
    return {dgate_up};
  }
};

}  // namespace

Tensor swiglu(const Tensor& gate_up) {
  check_shape(gate_up, "swiglu: gate_up", {-1, -1});
  PITH_CHECK(gate_up.size(1) % 2 == 0, "{}: gate and up must be of one size",
             describe(gate_up, "swiglu: gate_up"));
  return SwiGlu::apply(gate_up.contiguous());
}

}  // namespace pith
