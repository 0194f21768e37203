// Normal numbers on the device: the same stream as core/random.cpp.
#include <cuda_bf16.h>
#include "core/philox.h"

namespace pith::cuda {
namespace {
template <class T>
__global__ void fill_kernel(T* out, int64_t n, int64_t first, uint64_t key, float std) {
  const int64_t block = first / 4 + blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (block * 4 >= first + n) return;
  const Normal4 normal = normal4(key, uint64_t(block));
  for (int k = 0; k < 4; ++k) {
    const int64_t i = block * 4 + k - first;
    if (i >= 0 && i < n) out[i] = static_cast<T>(std * normal.value[k]);
  }
}
}

void fill_normal(
  void* out, int64_t n, int64_t first, uint64_t key, float std, bool bf16, CUstream_st* stream) {
  if (n == 0) return;
  const int64_t blocks = (first + n + 3) / 4 - first / 4;
  const auto grid = unsigned((blocks + 255) / 256);
  if (bf16)
    fill_kernel<<<grid, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(out), n, first, key, std);
  else fill_kernel<<<grid, 256, 0, stream>>>(static_cast<float*>(out), n, first, key, std);
}
}
