#include "operators/rotary.h"

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

template <class T>
void rotate_cpu(const Tensor& x, const Tensor& positions, const RotaryTable& table, bool inverse,
                Tensor& y) {
  const int64_t heads = x.size(1), dim = x.size(2), half = dim / 2;
  const T* in = x.const_data_ptr<T>();
  T* out = y.mutable_data_ptr<T>();
  const int32_t* position = positions.const_data_ptr<int32_t>();
  const float *cosines = table.cos.const_data_ptr<float>(),
              *sines = table.sin.const_data_ptr<float>();
  const Wide<T> sign = inverse ? -1 : 1;
  at::parallel_for(0, x.size(0), 1 + (1 << 14) / (heads * dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *cos = cosines + position[t] * half, *sin = sines + position[t] * half;
      for (int64_t h = 0; h < heads; ++h) {
        const T* from = in + t * x.stride(0) + h * x.stride(1);
        T* to = out + (t * heads + h) * dim;
        for (int64_t i = 0; i < half; ++i) {
          const Wide<T> a = static_cast<Wide<T>>(from[i]), b = static_cast<Wide<T>>(from[half + i]);
          const Wide<T> c = cos[i], s = sign * static_cast<Wide<T>>(sin[i]);
          to[i] = static_cast<T>(a * c - b * s);
          to[half + i] = static_cast<T>(b * c + a * s);
        }
      }
    }
  });
}

// x (T, heads, D) turned by the angles of its positions, or back. -> contiguous
Tensor rotate(const Tensor& x, const Tensor& positions, const RotaryTable& table, bool inverse) {
  Tensor y = at::empty(x.sizes(), x.options());
  if (y.numel() == 0) return y;
#if PITH_CUDA
  if (has_kernel(x)) {
    cuda::rotary(x.const_data_ptr(), positions.const_data_ptr<int32_t>(),
                 table.cos.const_data_ptr<float>(), table.sin.const_data_ptr<float>(),
                 y.mutable_data_ptr(), x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1),
                 table.cos.size(0), inverse, x.scalar_type() == at::kBFloat16,
                 c10::cuda::getCurrentCUDAStream());
    return y;
  }
#endif
  dispatch_float(x, "rotary: x",
                 [&](auto type) { rotate_cpu<decltype(type)>(x, positions, table, inverse, y); });
  return y;
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
    return {rotate(dy, saved[0], {saved[1], saved[2]}, /*inverse=*/true), Tensor(), Tensor(),
            Tensor()};
  }
};

}  // namespace

RotaryTable make_rotary_table(int64_t max_positions, int64_t head_dim, double theta,
                              at::Device device) {
  PITH_CHECK(max_positions > 0 && head_dim > 0 && head_dim % 2 == 0 && theta > 0,
             "rotary table of {} positions, head size {}, theta {}", max_positions, head_dim,
             theta);
  const int64_t half = head_dim / 2;
  Tensor cos = at::empty({max_positions, half}, at::kFloat), sin = at::empty_like(cos);
  float *c = cos.mutable_data_ptr<float>(), *s = sin.mutable_data_ptr<float>();
  at::parallel_for(0, max_positions, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < half; ++i) {
      const double frequency =
          std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
      for (int64_t p = begin; p < end; ++p) {
        c[p * half + i] = static_cast<float>(std::cos(static_cast<double>(p) * frequency));
        s[p * half + i] = static_cast<float>(std::sin(static_cast<double>(p) * frequency));
      }
    }
  });
  return {cos.to(device), sin.to(device)};
}

Tensor rotary(const Tensor& x, const Tensor& positions, const RotaryTable& table) {
  check_shape(x, "rotary: x", {-1, -1, -1});
  PITH_CHECK(x.size(2) % 2 == 0, "{}: the head size must be even", describe(x, "rotary: x"));
  PITH_CHECK(x.stride(2) == 1 || x.size(2) <= 1, "{}: the last dimension must be contiguous",
             describe(x, "rotary: x"));
  check_shape(positions, "rotary: positions", {x.size(0)});
  check_dtype(positions, "rotary: positions", at::kInt);
  check_shape(table.cos, "rotary: table.cos", {-1, x.size(2) / 2});
  check_shape(table.sin, "rotary: table.sin", {table.cos.size(0), x.size(2) / 2});
  check_dtype(table.cos, "rotary: table.cos", at::kFloat);
  check_dtype(table.sin, "rotary: table.sin", at::kFloat);
  const Tensor place = positions.contiguous();
  if (place.is_cpu()) {
    const int32_t* position = place.const_data_ptr<int32_t>();
    for (int64_t t = 0; t < place.numel(); ++t) {
      PITH_CHECK(position[t] >= 0 && position[t] < table.cos.size(0),
                 "positions[{}] = {} is not in the rotary table of {} positions", t, position[t],
                 table.cos.size(0));
    }
  }
  return Rotary::apply(x, place, table.cos.contiguous(), table.sin.contiguous());
}

}  // namespace pith
