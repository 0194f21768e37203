// FP32 as a sum of three BF16 numbers, for products on tensor cores.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

__global__ void split_kernel(const float* dy, bf16* parts, int64_t rows, int64_t columns) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= rows * columns) return;
  const int64_t row = i / columns, column = i % columns;
  float rest = dy[i];
  for (int part = 0; part < 3; ++part) {
    const bf16 rounded = __float2bfloat16_rn(rest);
    parts[(row * 3 + part) * columns + column] = rounded;
    rest -= __bfloat162float(rounded);
  }
}

}  // namespace

void split_bf16x3(
    const float* dy, void* parts, int64_t rows, int64_t columns, CUstream_st* stream) {
  if (rows * columns == 0) return;
  split_kernel<<<num_blocks(rows * columns, 256), 256, 0, stream>>>(
      dy, static_cast<bf16*>(parts), rows, columns);
  launch_check("split_bf16x3");
}

}  // namespace pith::cuda
