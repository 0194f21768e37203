// Small tensors from lists and back, and a scope with one thread. Provides values, ids, list,
// OneThread.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <algorithm>
#include <vector>
#include "core/tensor.h"

namespace pith::test {

// float32 on the CPU.
inline Tensor values(const std::vector<float>& list, std::vector<int64_t> shape) {
  Tensor out = at::empty(shape, at::TensorOptions(at::kFloat));
  PITH_CHECK(out.numel() == static_cast<int64_t>(list.size()), "{} values", list.size());
  std::copy(list.begin(), list.end(), out.mutable_data_ptr<float>());
  return out;
}

// int64 on the CPU.
inline Tensor ids(const std::vector<int64_t>& list, std::vector<int64_t> shape) {
  Tensor out = at::empty(shape, at::TensorOptions(at::kLong));
  PITH_CHECK(out.numel() == static_cast<int64_t>(list.size()), "{} ids", list.size());
  std::copy(list.begin(), list.end(), out.mutable_data_ptr<int64_t>());
  return out;
}

template <class T> std::vector<T> list(const Tensor& tensor) {
  const Tensor flat = tensor.detach().cpu().contiguous();
  return {flat.const_data_ptr<T>(), flat.const_data_ptr<T>() + flat.numel()};
}

// Thousands of calls on tiny tensors, as finite differences make them, only wait for other threads.
struct OneThread {
  int before = at::get_num_threads();
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before); }
};

} // namespace pith::test
