#include "operators/adamw.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <cmath>
#include <vector>

namespace pith {
namespace {

// The order of operations is that of PyTorch's fused AdamW; W is float or double.
template <class W, class T>
void update_cpu(Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
                Tensor& value, const Tensor& grad_scale, const AdamWStep& step) {
  const auto power = static_cast<double>(step.step);
  const W decay = static_cast<W>(step.learning_rate * step.weight_decay);
  const W beta1 = static_cast<W>(step.beta1), beta2 = static_cast<W>(step.beta2);
  const W rest1 = static_cast<W>(1 - step.beta1), rest2 = static_cast<W>(1 - step.beta2);
  const W rate = static_cast<W>(step.learning_rate / (1 - std::pow(step.beta1, power)));
  const W inverse_correction2 = static_cast<W>(1 / std::sqrt(1 - std::pow(step.beta2, power)));
  const W epsilon = static_cast<W>(step.epsilon);
  W *w = master.mutable_data_ptr<W>(), *m = exp_avg.mutable_data_ptr<W>();
  W* v = exp_avg_sq.mutable_data_ptr<W>();
  const W* g = grad.const_data_ptr<W>();
  const W scale = *grad_scale.const_data_ptr<W>();
  T* rounded = value.mutable_data_ptr<T>();
  at::parallel_for(0, master.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const W gradient = g[i] * scale;
      m[i] = beta1 * m[i] + rest1 * gradient;
      v[i] = beta2 * v[i] + rest2 * gradient * gradient;
      W weight = w[i];
      weight -= decay * weight;
      weight -= rate * m[i] / (std::sqrt(v[i]) * inverse_correction2 + epsilon);
      w[i] = weight;
      rounded[i] = static_cast<T>(weight);
    }
  });
}

// Blocks of fixed size, whatever the number of threads, summed in order.
template <class T>
double sum_of_squares_cpu(const Tensor& grad) {
  constexpr int64_t kBlock = 1 << 14;
  const int64_t n = grad.numel(), num_blocks = (n + kBlock - 1) / kBlock;
  const T* x = grad.const_data_ptr<T>();
  std::vector<double> partial(static_cast<size_t>(num_blocks));
  at::parallel_for(0, num_blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      double lane[4] = {0, 0, 0, 0};
      const int64_t end = std::min(n, (b + 1) * kBlock);
      for (int64_t i = b * kBlock; i < end; ++i) {
        const auto value = static_cast<double>(x[i]);
        lane[i % 4] += value * value;
      }
      partial[static_cast<size_t>(b)] = lane[0] + lane[1] + lane[2] + lane[3];
    }
  });
  double sum = 0;
  for (double part : partial) sum += part;
  return sum;
}

}  // namespace

void adamw_update(Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
                  Tensor& value, const Tensor& grad_scale, const AdamWStep& step) {
  check_shape(master, "adamw: master", {-1});
  const int64_t n = master.numel();
  const at::ScalarType dtype = master.scalar_type();
  const bool fp64 = dtype == at::kDouble;
  if (!fp64) check_dtype(master, "adamw: master", at::kFloat);
  const auto check = [&](const Tensor& tensor, const char* name) {
    check_shape(tensor, name, {n});
    check_dtype(tensor, name, dtype);
    PITH_CHECK(tensor.is_contiguous() && tensor.device() == master.device(),
               "{} should be contiguous and on the device of {}", describe(tensor, name),
               describe(master, "adamw: master"));
  };
  check(master, "adamw: master");
  check(exp_avg, "adamw: exp_avg");
  check(exp_avg_sq, "adamw: exp_avg_sq");
  check(grad, "adamw: grad");
  check_shape(grad_scale, "adamw: grad_scale", {});
  check_dtype(grad_scale, "adamw: grad_scale", dtype);
  check_shape(value, "adamw: value", {n});
  const bool bf16 = value.scalar_type() == at::kBFloat16;
  if (!bf16 || fp64) check_dtype(value, "adamw: value", dtype);
  PITH_CHECK(value.is_contiguous() && value.device() == master.device() &&
                 grad_scale.device() == master.device(),
             "{} and {} should be on the device of {}, the first one contiguous",
             describe(value, "adamw: value"), describe(grad_scale, "adamw: grad_scale"),
             describe(master, "adamw: master"));
  PITH_CHECK(step.step >= 1, "adamw: steps count from 1, not {}", step.step);
  if (n == 0) return;
#if PITH_CUDA
  if (master.is_cuda() && !fp64) {
    const auto power = static_cast<double>(step.step);
    const cuda::AdamWScalars scalars{
        static_cast<float>(step.learning_rate * step.weight_decay),
        static_cast<float>(step.beta1),
        static_cast<float>(step.beta2),
        static_cast<float>(1 - step.beta1),
        static_cast<float>(1 - step.beta2),
        static_cast<float>(step.epsilon),
        static_cast<float>(step.learning_rate / (1 - std::pow(step.beta1, power))),
        static_cast<float>(1 / std::sqrt(1 - std::pow(step.beta2, power)))};
    cuda::adamw_update(master.mutable_data_ptr<float>(), exp_avg.mutable_data_ptr<float>(),
                       exp_avg_sq.mutable_data_ptr<float>(), grad.const_data_ptr<float>(),
                       value.mutable_data_ptr(), n, grad_scale.const_data_ptr<float>(), scalars,
                       bf16, c10::cuda::getCurrentCUDAStream());
    return;
  }
#endif
  PITH_CHECK(master.is_cpu(), "adamw has no path for {}", describe(master, "master"));
  if (fp64) {
    update_cpu<double, double>(master, exp_avg, exp_avg_sq, grad, value, grad_scale, step);
  } else if (bf16) {
    update_cpu<float, at::BFloat16>(master, exp_avg, exp_avg_sq, grad, value, grad_scale, step);
  } else {
    update_cpu<float, float>(master, exp_avg, exp_avg_sq, grad, value, grad_scale, step);
  }
}

Tensor sum_of_squares(const Tensor& grad) {
  check_shape(grad, "sum_of_squares: grad", {-1});
  PITH_CHECK(grad.is_contiguous(), "{} should be contiguous",
             describe(grad, "sum_of_squares: grad"));
  Tensor result = at::empty({}, grad.options().dtype(at::kDouble));
#if PITH_CUDA
  if (grad.is_cuda() && grad.scalar_type() == at::kFloat) {
    Tensor partial = at::empty({cuda::sum_of_squares_blocks()}, result.options());
    cuda::sum_of_squares(grad.const_data_ptr<float>(), grad.numel(),
                         partial.mutable_data_ptr<double>(), result.mutable_data_ptr<double>(),
                         c10::cuda::getCurrentCUDAStream());
    return result;
  }
#endif
  PITH_CHECK(grad.is_cpu(), "sum_of_squares has no path for {}", describe(grad, "grad"));
  if (grad.scalar_type() == at::kDouble) {
    result.fill_(sum_of_squares_cpu<double>(grad));
  } else {
    check_dtype(grad, "sum_of_squares: grad", at::kFloat);
    result.fill_(sum_of_squares_cpu<float>(grad));
  }
  return result;
}

}  // namespace pith
