#pragma once
#include "core/parameter.h"

namespace pith {
inline Tensor widen(const Tensor& x) { return x.to(wide_dtype(x.scalar_type())); }

// out (M, N) = a (M, K) b (K, N), summed in FP32 (FP64 for FP64), rounded once to out's dtype: the
// operands', or their wide_dtype. Not differentiable.
void multiply_into(Tensor& out, const Tensor& a, const Tensor& b);
Tensor multiply(const Tensor& a, const Tensor& b, ScalarType dtype);

// f(expert, first row, count) where there are rows; offsets (E) int32: ends. Waits for a GPU.
template <class F> void for_each_expert(const Tensor& offsets, F&& f) {
  const Tensor host = offsets.cpu();
  const int32_t* end = host.const_data_ptr<int32_t>();
  int64_t begin = 0;
  for (int64_t e = 0; e < host.numel(); begin = end[e++])
    if (end[e] > begin) f(e, begin, end[e] - begin);
}

// gradient (out, in) in wide_dtype += alpha * dy^T x; dy (T, out), x (T, in); T may be 0.
void add_weight_gradient(
  const Tensor& gradient, const Tensor& dy, const Tensor& x, double alpha = 1);

// Into a parameter's buffer; with offsets (E) rows are by expert, the gradient (E, out, in).
struct WeightGradient {
  Parameter* weight;
  Tensor dy, x, offsets;
};
void add_weight_gradient(const WeightGradient& job);

// While one lives, backward passes leave weight gradients in `jobs`, uncomputed, for the caller to
// fill waits with. One at a time, for all threads (autograd has its own).
class DeferWeightGradients {
 public:
  explicit DeferWeightGradients(vector<WeightGradient>& jobs);
  ~DeferWeightGradients();
  DeferWeightGradients(const DeferWeightGradients&) = delete;
  DeferWeightGradients& operator=(const DeferWeightGradients&) = delete;
};
void add_or_defer(WeightGradient job);
}
