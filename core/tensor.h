#pragma once
#include <ATen/core/Tensor.h>

namespace pith {
using at::Tensor, at::TensorOptions, at::ScalarType, at::Device, at::NoGradGuard, at::kBFloat16,
  at::kBool, at::kByte, at::kCPU, at::kCUDA, at::kDouble, at::kFloat, at::kHalf, at::kInt,
  at::kLong;

// "hidden: bfloat16 (4096, 2048) on cuda:0", or "hidden: undefined".
string describe(const Tensor& tensor, string_view name);
string dtype_name(ScalarType dtype); // "float32", "bfloat16", ...

// Throw unless tensor is defined and has this shape (-1: any size), this dtype, or both.
void check_shape(const Tensor& tensor, string_view name, initializer_list<int64_t> shape);
void check_dtype(const Tensor& tensor, string_view name, ScalarType dtype);
void check_tensor(
  const Tensor& tensor, string_view name, ScalarType dtype, initializer_list<int64_t> shape);

// Dtype of sums, logits and gradients: FP64 for FP64, otherwise FP32.
inline ScalarType wide_dtype(ScalarType dtype) { return dtype == kDouble ? kDouble : kFloat; }

inline int64_t div_exact(int64_t a, int64_t b) {
  PITH_CHECK(b != 0 && a % b == 0, "{} is not divisible by {}", a, b);
  return a / b;
}

// Throws when the value does not fit.
template <class To, class From> To narrow(From value) {
  static_assert(std::is_integral_v<To> && std::is_integral_v<From>);
  const auto result = static_cast<To>(value);
  PITH_CHECK(static_cast<From>(result) == value && (result < To{}) == (value < From{}),
    "the value {} does not fit into {} bytes", value, sizeof(To));
  return result;
}
}
