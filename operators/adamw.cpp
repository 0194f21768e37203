#include "operators/adamw.h"
#include "operators/function.h"

namespace pith {
namespace {
template <class W> cuda::AdamWScalars<W> scalars_of(const AdamWStep& step) {
  const auto power = double(step.step);
  return {W(step.learning_rate * step.weight_decay), W(step.beta1), W(1 - step.beta1),
    W(step.beta2), W(1 - step.beta2), W(step.epsilon),
    W(step.learning_rate / (1 - std::pow(step.beta1, power))),
    W(1 / sqrt(1 - std::pow(step.beta2, power)))};
}

// In the order of PyTorch's fused AdamW. W: the dtype of computing, M: of the moments.
template <class W, class M> void update_cpu(Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq,
  const Tensor& grad, const Tensor& grad_scale, const AdamWStep& step) {
  const cuda::AdamWScalars<W> s = scalars_of<W>(step);
  W* w = master.mutable_data_ptr<W>();
  M *first = exp_avg.mutable_data_ptr<M>(), *second = exp_avg_sq.mutable_data_ptr<M>();
  const W *g = grad.const_data_ptr<W>(), scale = *grad_scale.const_data_ptr<W>();
  for (int64_t i = 0; i < master.numel(); ++i) {
    const W gradient = g[i] * scale;
    const W m = s.beta1 * W(first[i]) + s.rest1 * gradient;
    const W v = s.beta2 * W(second[i]) + s.rest2 * gradient * gradient;
    const W decayed = w[i] - s.decay * w[i];
    w[i] = decayed - s.rate * m / (sqrt(v) * s.inverse_correction2 + s.epsilon);
    first[i] = M(m);
    second[i] = M(v);
  }
}

template <class T> double sum_of_squares_cpu(const Tensor& grad) {
  const T* x = grad.const_data_ptr<T>();
  double lane[4] = {}; // which the compiler keeps in vector registers
  for (int64_t i = 0; i < grad.numel(); ++i) {
    const auto value = double(x[i]);
    lane[i % 4] += value * value;
  }
  return lane[0] + lane[1] + lane[2] + lane[3];
}
}

void adamw_update(Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
  Tensor& value, const Tensor& grad_scale, const AdamWStep& step) {
  const ScalarType wide = wide_dtype(master.scalar_type());
  const bool bf16 = is_bf16(value) && wide == kFloat;
  const auto check = [&](const Tensor& tensor, const char* name, ScalarType dtype,
                       initializer_list<int64_t> shape) {
    check_tensor(tensor, name, dtype, shape);
    PITH_CHECK(tensor.is_contiguous() && tensor.device() == master.device(),
      "{} should be contiguous and on the device of {}", describe(tensor, name),
      describe(master, "adamw: master"));
  };
  check(master, "adamw: master", wide, {-1});
  const int64_t n = master.numel();
  const bool bf16_moments = is_bf16(exp_avg) && wide == kFloat;
  check(exp_avg, "adamw: exp_avg", bf16_moments ? kBFloat16 : wide, {n});
  check(exp_avg_sq, "adamw: exp_avg_sq", exp_avg.scalar_type(), {n});
  check(grad, "adamw: grad", wide, {n});
  check(grad_scale, "adamw: grad_scale", wide, {});
  check(value, "adamw: value", bf16 ? kBFloat16 : wide, {n});
  PITH_CHECK(step.step >= 1, "adamw: steps count from 1, not {}", step.step);
  if (n == 0) return;
  PITH_IF_CUDA (master) {
    return cuda::adamw_update(write<float>(master), write(exp_avg), write(exp_avg_sq),
      read<float>(grad), write(value), n, read<float>(grad_scale), scalars_of<float>(step), bf16,
      bf16_moments, current_stream());
  }
  const auto update = wide == kDouble ? update_cpu<double, double>
    : bf16_moments                    ? update_cpu<float, at::BFloat16>
                                      : update_cpu<float, float>;
  update(master, exp_avg, exp_avg_sq, grad, grad_scale, step);
  value.copy_(master);
}

Tensor sum_of_squares(const Tensor& grad) {
  check_tensor(grad, "sum_of_squares: grad", wide_dtype(grad.scalar_type()), {-1});
  PITH_CHECK(
    grad.is_contiguous(), "{} should be contiguous", describe(grad, "sum_of_squares: grad"));
  Tensor result = at::empty({}, grad.options().dtype(kDouble));
  PITH_IF_CUDA (grad) {
    Tensor partial = at::empty({cuda::sum_of_squares_blocks()}, result.options());
    cuda::sum_of_squares(read<float>(grad), grad.numel(), write<double>(partial),
      write<double>(result), current_stream());
    return result;
  }
  return result.fill_(grad.scalar_type() == kDouble ? sum_of_squares_cpu<double>(grad)
                                                    : sum_of_squares_cpu<float>(grad));
}
}
