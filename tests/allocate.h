#pragma once
#include "core/parameter.h"

namespace pith {
// Gives a parameter buffers of its own, outside any shard group.
inline void allocate(Parameter& parameter, at::ScalarType dtype, at::Device device) {
  const auto options = at::TensorOptions().device(device);
  parameter.value = at::zeros(parameter.shape, options.dtype(dtype));
  parameter.value.set_requires_grad(true);
  parameter.grad = at::zeros(parameter.shape, options.dtype(wide_dtype(dtype)));
}

} // namespace pith
