#pragma once
#include "operators/kernels.h"
#include "operators/matmul.h"

namespace pith {
using Tensors = vector<Tensor>;

// Makes `y`, just computed from `inputs` without autograd, differentiable: the backward pass calls
// backward(dy) once, without autograd, for one gradient an input (undefined: none). Without grad
// mode or an input that requires a gradient nothing is kept. `backward` may hold inputs, but its
// own outputs only detached: they would hold each other.
Tensor record(const Tensor& y, const Tensors& inputs, function<Tensors(const Tensor&)> backward);
// The same with several outputs; some gradients may be undefined.
void record(
  const Tensors& outputs, const Tensors& inputs, function<Tensors(const Tensors&)> backward);

using cuda::current_stream;

inline bool is_bf16(const Tensor& tensor) { return tensor.scalar_type() == kBFloat16; }

// The CUDA kernels know FP32 and BF16.
inline bool has_kernel(const Tensor& tensor) {
  return tensor.is_cuda() && (is_bf16(tensor) || tensor.scalar_type() == kFloat);
}

// PITH_IF_CUDA(x) { the kernel }: a build without CUDA discards the block and the kernels in it,
// which exist nowhere. No `else` may follow.
#define PITH_IF_CUDA(tensor) \
  if constexpr (!PITH_CUDA) { \
  } else if (::pith::has_kernel(tensor))

// For a kernel; null where undefined.
template <class T> const T* read(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}
template <class T> T* write(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<T>() : nullptr;
}
inline cuda::Data write(const Tensor& tensor) {
  if (!tensor.defined()) return {nullptr, false};
  return {tensor.mutable_data_ptr(), is_bf16(tensor)};
}
inline cuda::Data read(const Tensor& tensor) { return write(tensor); }

// Throws where an id (int32 or int64, one or two dimensions) is neither `none` nor in [0, end). Ids
// on a GPU are not read: that would wait.
void check_ids(const Tensor& ids, string_view name, int64_t end, int64_t none = 0);
}
