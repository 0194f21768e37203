// What an operator's .cpp stands on: autograd's node, the branch to CUDA kernels, checks of ids.
#pragma once
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

using cuda::current_stream;

inline bool is_bf16(const Tensor& tensor) { return tensor.scalar_type() == at::kBFloat16; }

// Whether the CUDA kernels take this tensor. They know FP32 and BF16.
inline bool has_kernel(const Tensor& tensor) {
  return tensor.is_cuda() && (is_bf16(tensor) || tensor.scalar_type() == at::kFloat);
}

// PITH_IF_CUDA(x) { the kernel }: a build without CUDA discards the block, and with it the kernels
// that are named there and exist nowhere. No `else` may follow.
#define PITH_IF_CUDA(tensor)  \
  if constexpr (!PITH_CUDA) { \
  } else if (::pith::has_kernel(tensor))

// Data for a kernel to read or to write; null where the tensor is undefined.
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

// Throws where an id (int32 or int64, one or two dimensions) is neither `none` nor in [0, end).
// Ids on a GPU are not looked at: that would wait for it.
void check_ids(const Tensor& ids, std::string_view name, int64_t end, int64_t none = 0);

}
