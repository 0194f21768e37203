// From a tensor's dtype to C++ types, for the CPU loops of operators.
#pragma once
#include <type_traits>

#include "core/tensor.h"

namespace pith {

// The type that values of T are computed in: FP64 for FP64, otherwise FP32.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f(T{}) with T = float, double or at::BFloat16 as `tensor` (on the CPU) has it.
template <class F>
void dispatch_float(const Tensor& tensor, std::string_view name, F&& f) {
  PITH_CHECK(tensor.is_cpu(), "{}: this build has no kernel for this dtype and device",
             describe(tensor, name));
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    case at::kBFloat16:
      return f(at::BFloat16{});
    default:
      PITH_FAIL("{}; its dtype should be float32, bfloat16 or float64", describe(tensor, name));
  }
}

// Whether the CUDA kernels take this tensor. They know FP32 and BF16.
inline bool has_kernel(const Tensor& tensor) {
  return tensor.is_cuda() &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16);
}

}  // namespace pith
