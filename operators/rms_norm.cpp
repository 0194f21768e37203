#include "operators/rms_norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>

#include "operators/dispatch.h"

namespace pith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows of x (..., D): row r starts at (r / inner) * outer_stride + (r % inner) * inner_stride.
struct Rows {
  int64_t count, dim, inner, outer_stride, inner_stride;
  int64_t start(int64_t r) const { return r / inner * outer_stride + r % inner * inner_stride; }
};

Rows rows_of(const Tensor& x) {
  const int64_t dim = x.size(-1), count = dim == 0 ? 0 : x.numel() / dim;
  if (x.dim() == 3) return {count, dim, std::max<int64_t>(1, x.size(1)), x.stride(0), x.stride(1)};
  return {count, dim, 1, x.dim() == 2 ? x.stride(0) : dim, 0};
}

// Whether rows_of describes x: up to three dimensions, the last one contiguous.
bool has_rows(const Tensor& x) { return x.is_contiguous() || (x.dim() <= 3 && x.stride(-1) == 1); }

// sum over j < n of term(j), in sixteen interleaved sums that the compiler can keep in vector
// registers.
template <class T, class F>
T sum_of(int64_t n, F&& term) {
  constexpr int64_t kLanes = 16;
  std::array<T, kLanes> lane{};
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lane[static_cast<size_t>(l)] += term(j + l);
  }
  T sum{};
  for (; j < n; ++j) sum += term(j);
  for (T part : lane) sum += part;
  return sum;
}

template <class T>
void forward_cpu(const Tensor& x, const Tensor& weight, double eps, Tensor& y, Tensor& rstd) {
  using W = Wide<T>;
  const Rows rows = rows_of(x);
  const T *in = x.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
  T* out = y.mutable_data_ptr<T>();
  W* inverse = rstd.mutable_data_ptr<W>();
  at::parallel_for(0, rows.count, 1 + (1 << 14) / rows.dim, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = in + rows.start(r);
      const W squares = sum_of<W>(rows.dim, [&](int64_t j) {
        const W value = static_cast<W>(row[j]);
        return value * value;
      });
      inverse[r] = 1 / std::sqrt(squares / static_cast<W>(rows.dim) + static_cast<W>(eps));
      for (int64_t j = 0; j < rows.dim; ++j) {
        const W normal = static_cast<W>(row[j]) * inverse[r];
        out[r * rows.dim + j] = static_cast<T>(normal * static_cast<W>(w[j]));
      }
    }
  });
}

// With n = x rstd and g = dy w: dx = rstd (g - n mean(g n)), dw += sum over rows of dy n. dx may be
// null. The sums for dw run over blocks of rows whose borders don't depend on the number of
// threads.
template <class T>
void backward_cpu(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dy,
                  T* dx, Tensor& dweight) {
  using W = Wide<T>;
  const Rows rows = rows_of(x);
  const int64_t dim = rows.dim, block = std::max<int64_t>(16, (rows.count + 63) / 64);
  const int64_t num_blocks = (rows.count + block - 1) / block;
  const T *in = x.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
  const T* dout = dy.const_data_ptr<T>();
  const W* inverse = rstd.const_data_ptr<W>();
  const bool weight_gradient = dweight.defined();
  std::vector<W> partial(static_cast<size_t>(num_blocks * dim), W{0});
  at::parallel_for(0, num_blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      W* dw = partial.data() + b * dim;
      for (int64_t r = b * block; r < std::min(rows.count, (b + 1) * block); ++r) {
        const T *row = in + rows.start(r), *d = dout + r * dim;
        const W scale = inverse[r];
        if (weight_gradient) {
          for (int64_t j = 0; j < dim; ++j) {
            dw[j] += static_cast<W>(d[j]) * (static_cast<W>(row[j]) * scale);
          }
        }
        if (dx == nullptr) continue;
        const W projection = sum_of<W>(dim, [&](int64_t j) {
          return static_cast<W>(d[j]) * static_cast<W>(w[j]) * static_cast<W>(row[j]);
        });
        const W pull = projection * scale * scale / static_cast<W>(dim);
        for (int64_t j = 0; j < dim; ++j) {
          const W g = static_cast<W>(d[j]) * static_cast<W>(w[j]);
          dx[r * dim + j] = static_cast<T>(scale * (g - static_cast<W>(row[j]) * pull));
        }
      }
    }
  });
  if (!weight_gradient) return;
  W* total = dweight.mutable_data_ptr<W>();
  for (int64_t b = 0; b < num_blocks; ++b) {
    for (int64_t j = 0; j < dim; ++j) total[j] += partial[static_cast<size_t>(b * dim + j)];
  }
}

#if PITH_CUDA
cuda::NormRows kernel_rows(const Tensor& x) {
  const Rows rows = rows_of(x);
  return {rows.count, rows.dim, rows.inner, rows.outer_stride, rows.inner_stride};
}
#endif

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& value,
                        Parameter* weight, double eps) {
    Tensor y = at::empty(x.sizes(), x.options());
    const at::ScalarType wide = grad_dtype(x.scalar_type());
    Tensor rstd =
        at::empty(x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)), x.options().dtype(wide));
    ctx->save_for_backward({x, rstd});
    ctx->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    if (x.numel() == 0) return y;
#if PITH_CUDA
    if (has_kernel(x)) {
      cuda::rms_norm_forward(x.const_data_ptr(), kernel_rows(x), value.const_data_ptr(), eps,
                             y.mutable_data_ptr(), rstd.mutable_data_ptr<float>(),
                             x.scalar_type() == at::kBFloat16, c10::cuda::getCurrentCUDAStream());
      return y;
    }
#endif
    dispatch_float(x, "rms_norm: x",
                   [&](auto type) { forward_cpu<decltype(type)>(x, value, eps, y, rstd); });
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &rstd = saved[1];
    auto* weight = reinterpret_cast<Parameter*>(ctx->saved_data["weight"].toInt());
    const Tensor dy = grads[0].contiguous();
    Tensor dx = ctx->needs_input_grad(0) ? at::empty(x.sizes(), x.options()) : Tensor();
    Tensor dweight = ctx->needs_input_grad(1) ? weight->grad : Tensor();
    if (x.numel() == 0) return {dx, Tensor(), Tensor(), Tensor()};
#if PITH_CUDA
    if (has_kernel(x)) {
      const cuda::NormRows rows = kernel_rows(x);
      const bool bf16 = x.scalar_type() == at::kBFloat16;
      Tensor partial = at::empty({cuda::rms_norm_blocks(rows), rows.dim}, rstd.options());
      cuda::rms_norm_backward(x.const_data_ptr(), rows, weight->value.const_data_ptr(),
                              rstd.const_data_ptr<float>(), dy.const_data_ptr(),
                              dx.defined() ? dx.mutable_data_ptr() : nullptr,
                              partial.mutable_data_ptr<float>(),
                              dweight.defined() ? dweight.mutable_data_ptr<float>() : nullptr, bf16,
                              c10::cuda::getCurrentCUDAStream());
      return {dx, Tensor(), Tensor(), Tensor()};
    }
#endif
    dispatch_float(x, "rms_norm: x", [&](auto type) {
      using T = decltype(type);
      T* to = dx.defined() ? dx.mutable_data_ptr<T>() : nullptr;
      backward_cpu<T>(x, weight->value, rstd, dy, to, dweight);
    });
    return {dx, Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor rms_norm(const Tensor& x, Parameter& weight, double eps) {
  check_shape(weight.value, weight.name, {-1});
  PITH_CHECK(x.defined() && x.dim() > 0 && x.size(-1) == weight.value.size(0),
             "{}; its last dimension should be {} as in {}", describe(x, "rms_norm: x"),
             weight.value.size(0), weight.name);
  check_dtype(x, "rms_norm: input of " + weight.name, weight.value.scalar_type());
  return RmsNorm::apply(has_rows(x) ? x : x.contiguous(), weight.value, &weight, eps);
}

}  // namespace pith
