#include "operators/adamw.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "operators/function.h"

namespace pith {
namespace {

template <class W>
cuda::AdamWScalars<W> scalars_of(const AdamWStep& step) {
  const auto power = static_cast<double>(step.step);
  return {static_cast<W>(step.learning_rate * step.weight_decay), static_cast<W>(step.beta1),
      static_cast<W>(1 - step.beta1), static_cast<W>(step.beta2), static_cast<W>(1 - step.beta2),
      static_cast<W>(step.epsilon),
      static_cast<W>(step.learning_rate / (1 - std::pow(step.beta1, power))),
      static_cast<W>(1 / std::sqrt(1 - std::pow(step.beta2, power)))};
}

// The order of operations is that of PyTorch's fused AdamW; T is the dtype of value.
template <class T>
void update_cpu(Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
    Tensor& value, const Tensor& grad_scale, const AdamWStep& step) {
  using W = Wide<T>;
  const cuda::AdamWScalars<W> s = scalars_of<W>(step);
  W *w = master.mutable_data_ptr<W>(), *m = exp_avg.mutable_data_ptr<W>();
  W* v = exp_avg_sq.mutable_data_ptr<W>();
  const W* g = grad.const_data_ptr<W>();
  const W scale = *grad_scale.const_data_ptr<W>();
  T* rounded = value.mutable_data_ptr<T>();
  for_rows(master.numel(), 1, [=](int64_t i) {
    const W gradient = g[i] * scale;
    m[i] = s.beta1 * m[i] + s.rest1 * gradient;
    v[i] = s.beta2 * v[i] + s.rest2 * gradient * gradient;
    W weight = w[i];
    weight -= s.decay * weight;
    weight -= s.rate * m[i] / (std::sqrt(v[i]) * s.inverse_correction2 + s.epsilon);
    w[i] = weight;
    rounded[i] = static_cast<T>(weight);
  });
}

// Blocks of fixed size, whatever the number of threads, summed in order.
template <class T>
double sum_of_squares_cpu(const Tensor& grad) {
  constexpr int64_t kBlock = 1 << 14;
  const int64_t n = grad.numel(), num_blocks = (n + kBlock - 1) / kBlock;
  const T* x = grad.const_data_ptr<T>();
  std::vector<double> partial(static_cast<size_t>(num_blocks));
  for_rows(num_blocks, kBlock, [&](int64_t b) {
    double lane[4] = {0, 0, 0, 0};
    const int64_t end = std::min(n, (b + 1) * kBlock);
    for (int64_t i = b * kBlock; i < end; ++i) {
      const auto value = static_cast<double>(x[i]);
      lane[i % 4] += value * value;
    }
    partial[static_cast<size_t>(b)] = lane[0] + lane[1] + lane[2] + lane[3];
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
  const bool fp64 = master.scalar_type() == at::kDouble, bf16 = is_bf16(value) && !fp64;
  const at::ScalarType dtype = fp64 ? at::kDouble : at::kFloat;
  const auto check = [&](const Tensor& tensor, const char* name, at::ScalarType wanted,
                         std::initializer_list<int64_t> shape) {
    check_shape(tensor, name, shape);
    check_dtype(tensor, name, wanted);
    PITH_CHECK(tensor.is_contiguous() && tensor.device() == master.device(),
        "{} should be contiguous and on the device of {}", describe(tensor, name),
        describe(master, "adamw: master"));
  };
  check(master, "adamw: master", dtype, {n});
  check(exp_avg, "adamw: exp_avg", dtype, {n});
  check(exp_avg_sq, "adamw: exp_avg_sq", dtype, {n});
  check(grad, "adamw: grad", dtype, {n});
  check(grad_scale, "adamw: grad_scale", dtype, {});
  check(value, "adamw: value", bf16 ? at::kBFloat16 : dtype, {n});
  PITH_CHECK(step.step >= 1, "adamw: steps count from 1, not {}", step.step);
  if (n == 0) return;
  PITH_IF_CUDA (master) {
    return cuda::adamw_update(master.mutable_data_ptr<float>(), exp_avg.mutable_data_ptr<float>(),
        exp_avg_sq.mutable_data_ptr<float>(), grad.const_data_ptr<float>(),
        value.mutable_data_ptr(), n, grad_scale.const_data_ptr<float>(), scalars_of<float>(step),
        bf16, current_stream());
  }
  dispatch_float(value, "adamw: value", [&](auto zero) {
    update_cpu<decltype(zero)>(master, exp_avg, exp_avg_sq, grad, value, grad_scale, step);
  });
}

Tensor sum_of_squares(const Tensor& grad) {
  check_shape(grad, "sum_of_squares: grad", {-1});
  check_dtype(grad, "sum_of_squares: grad", wide_dtype(grad.scalar_type()));
  PITH_CHECK(
      grad.is_contiguous(), "{} should be contiguous", describe(grad, "sum_of_squares: grad"));
  Tensor result = at::empty({}, grad.options().dtype(at::kDouble));
  PITH_IF_CUDA (grad) {
    Tensor partial = at::empty({cuda::sum_of_squares_blocks()}, result.options());
    cuda::sum_of_squares(grad.const_data_ptr<float>(), grad.numel(),
        partial.mutable_data_ptr<double>(), result.mutable_data_ptr<double>(), current_stream());
    return result;
  }
  dispatch_float(grad, "sum_of_squares: grad",
      [&](auto zero) { result.fill_(sum_of_squares_cpu<decltype(zero)>(grad)); });
  return result;
}

}  // namespace pith
