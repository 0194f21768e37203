// What the .cpp of an operator stands on: autograd's functions, the branch to the CUDA kernels, and
// for its CPU path types, loops over rows, checks of ids.
#pragma once
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>
#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <array>
#include <type_traits>

#include "operators/kernels.h"
#include "operators/matmul.h"

namespace pith {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

#if PITH_CUDA
inline constexpr bool kCuda = true;
inline CUstream_st* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
#else
inline constexpr bool kCuda = false;
CUstream_st* current_stream();  // named in discarded branches only
#endif

inline bool is_bf16(const Tensor& tensor) { return tensor.scalar_type() == at::kBFloat16; }

// Whether the CUDA kernels take this tensor. They know FP32 and BF16.
inline bool has_kernel(const Tensor& tensor) {
  return tensor.is_cuda() && (is_bf16(tensor) || tensor.scalar_type() == at::kFloat);
}

// PITH_IF_CUDA(x) { the kernel }: a build without CUDA discards the block, and with it the kernels
// that are named there and exist nowhere. No `else` may follow.
#define PITH_IF_CUDA(tensor)      \
  if constexpr (!::pith::kCuda) { \
  } else if (::pith::has_kernel(tensor))

// Data of a tensor that may be undefined.
template <class T>
const T* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

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

// Calls f(row) for every row, in tasks of so many elements that they are worth a thread.
template <class F>
void for_rows(int64_t rows, int64_t elements_per_row, F&& f) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, elements_per_row));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

// Throws where an id (int32 or int64, one or two dimensions) is neither `none` nor in [0, end).
// Ids on a GPU are not looked at: that would wait for it.
inline void check_ids(const Tensor& ids, std::string_view name, int64_t end, int64_t none = 0) {
  if (!ids.is_cpu()) return;
  const Tensor all = ids.to(at::kLong).contiguous();
  const int64_t* id = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < all.numel(); ++i) {
    if ((id[i] >= 0 && id[i] < end) || (none < 0 && id[i] == none)) [[likely]]
      continue;
    const std::string place = ids.dim() == 2
                                  ? fmt::format("({}, {})", i / ids.size(1), i % ids.size(1))
                                  : fmt::format("[{}]", i);
    PITH_FAIL("{}{} = {} is not in [0, {}){}", name, place, id[i], end,
        none < 0 ? fmt::format(" and not {}", none) : "");
  }
}

}  // namespace pith
