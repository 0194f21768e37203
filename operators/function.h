// What an operator's .cpp stands on: autograd's node, the branch to CUDA kernels, checks of ids.
#pragma once
#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include "operators/kernels.h"
#include "operators/matmul.h"

namespace pith {

using Tensors = std::vector<Tensor>;

// Makes `y`, just computed from `inputs` without autograd, differentiable: the backward pass calls
// backward(dy) once, without autograd, for one gradient an input (undefined: none). Without grad
// mode, or where no input requires a gradient, nothing is kept. `backward` may hold inputs, but of
// its own outputs only detached ones: they would hold each other.
Tensor record(
    const Tensor& y, const Tensors& inputs, std::function<Tensors(const Tensor&)> backward);
// The same with several outputs, of whose gradients some may be undefined.
void record(
    const Tensors& outputs, const Tensors& inputs, std::function<Tensors(const Tensors&)> backward);

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

// Data for a kernel to read or to write; null where the tensor is undefined.
template <class T = void> const T* read(const Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  if constexpr (std::is_void_v<T>)
    return tensor.const_data_ptr();
  else
    return tensor.const_data_ptr<T>();
}
template <class T = void> T* write(const Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  if constexpr (std::is_void_v<T>)
    return tensor.mutable_data_ptr();
  else
    return tensor.mutable_data_ptr<T>();
}

// Throws where an id (int32 or int64, one or two dimensions) is neither `none` nor in [0, end).
// Ids on a GPU are not looked at: that would wait for it.
void check_ids(const Tensor& ids, std::string_view name, int64_t end, int64_t none = 0);

}  // namespace pith
