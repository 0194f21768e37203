#include "core/random.h"
#include <xxhash.h>

#if PITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace pith {
#if PITH_CUDA
namespace cuda {
// random.cu; out (n) float32, or bfloat16 where bf16.
void fill_normal(
  void* out, int64_t n, int64_t first, uint64_t key, float std, bool bf16, CUstream_st* stream);
}
#endif

uint64_t stream_key(uint64_t seed, string_view name) {
  return XXH3_64bits_withSeed(name.data(), name.size(), seed);
}

int64_t permuted(uint64_t key, int64_t index, int64_t size) {
  int half = 1;
  while ((int64_t{1} << (2 * half)) < size) ++half;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto value = uint64_t(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = left ^ (philox(key, round << 60 | right).word[0] & mask);
      left = right;
      right = mixed;
    }
    value = left << half | right;
  } while (value >= uint64_t(size));
  return int64_t(value);
}

void fill_normal(Tensor& out, uint64_t seed, string_view name, double std, int64_t first) {
  PITH_CHECK(out.defined() && out.is_contiguous() && first >= 0,
    "fill_normal needs a contiguous tensor and an index >= 0; {}, index {}", describe(out, name),
    first);
  const uint64_t key = stream_key(seed, name);
  const int64_t n = out.numel();
  const ScalarType dtype = out.scalar_type();
#if PITH_CUDA
  if (out.is_cuda() && (dtype == kFloat || dtype == kBFloat16)) {
    const c10::cuda::CUDAGuard guard(out.device());
    cuda::fill_normal(out.data_ptr(), n, first, key, float(std), dtype == kBFloat16,
      c10::cuda::getCurrentCUDAStream());
    return;
  }
#endif
  PITH_CHECK(
    out.is_cpu() && out.is_floating_point(), "fill_normal has no path for {}", describe(out, name));
  Tensor wide = dtype == kFloat ? out : at::empty(out.sizes(), kFloat);
  float* values = wide.data_ptr<float>();
  const auto std32 = float(std);
  Normal4 normal;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t place = (first + i) % 4;
    if (i == 0 || place == 0) normal = normal4(key, uint64_t((first + i) / 4));
    values[i] = std32 * normal.value[place];
  }
  if (!wide.is_same(out)) out.copy_(wide);
}
}
