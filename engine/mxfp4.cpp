#include "engine/mxfp4.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cmath>
#include <limits>

namespace pith {

Tensor dequantize_mxfp4(const Tensor& blocks, const Tensor& scales) {
  constexpr std::array<float, 8> kMagnitude{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::vector<int64_t> shape = scales.sizes().vec();
  shape.push_back(16);
  check_dtype(scales, "MXFP4 scales", at::kByte);
  check_dtype(blocks, "MXFP4 blocks", at::kByte);
  PITH_CHECK(blocks.sizes() == at::IntArrayRef(shape), "{} does not belong to {}",
      describe(blocks, "MXFP4 blocks"), describe(scales, "scales"));
  shape.pop_back();
  shape.back() *= 32;
  const Tensor packed = blocks.contiguous(), exponents = scales.contiguous();
  Tensor out = at::empty(shape, at::TensorOptions(at::kFloat));
  const uint8_t *block = packed.const_data_ptr<uint8_t>(),
                *scale = exponents.const_data_ptr<uint8_t>();
  float* value = out.mutable_data_ptr<float>();
  at::parallel_for(0, scales.numel(), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const float unit = scale[group] == 255 ? std::numeric_limits<float>::quiet_NaN()
                                             : std::ldexp(1.0f, scale[group] - 127);
      for (int64_t i = 0; i < 32; ++i) {
        const int code = (block[group * 16 + i / 2] >> (i % 2 * 4)) & 15;
        const float magnitude = kMagnitude[static_cast<size_t>(code & 7)] * unit;
        value[group * 32 + i] = code < 8 ? magnitude : -magnitude;
      }
    }
  });
  return out;
}

}  // namespace pith
