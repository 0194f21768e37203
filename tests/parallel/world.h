// The processes of test_parallel, and tensors on the device under test.
#pragma once
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include "core/comm.h"
#include "tests/operators/error_text.h"

namespace pith::test {

const World& world();
at::Device device(); // cuda with PITH_TEST_DEVICE=cuda, else cpu

inline at::TensorOptions on_device(at::ScalarType dtype) {
  return at::TensorOptions().dtype(dtype).device(device());
}
inline Tensor full(at::IntArrayRef shape, double value, at::ScalarType dtype) {
  return at::full(shape, value, on_device(dtype));
}
inline Tensor zeros(at::IntArrayRef shape, at::ScalarType dtype) { return full(shape, 0, dtype); }
inline Tensor arange(int64_t end, at::ScalarType dtype) {
  return at::arange(end, on_device(dtype));
}

} // namespace pith::test
