#include "core/random.h"

#include <ATen/Parallel.h>
#include <xxhash.h>

#include <algorithm>

#if PITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace pith {
namespace {

template <class T>
void fill(T* out, int64_t n, int64_t first, uint64_t key, float std) {
  at::parallel_for(0, n, 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t index = first + i;
      const Normal4 normal = normal4(key, static_cast<uint64_t>(index / 4));
      const int64_t stop = std::min(end, i + 4 - index % 4);
      for (; i < stop; ++i) out[i] = static_cast<T>(std * normal.value[(first + i) % 4]);
    }
  });
}

}  // namespace

uint64_t stream_key(uint64_t seed, std::string_view name) {
  return XXH3_64bits_withSeed(name.data(), name.size(), seed);
}

int64_t permuted(uint64_t key, int64_t index, int64_t size) {
  int half = 1;
  while ((int64_t{1} << (2 * half)) < size) ++half;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto value = static_cast<uint64_t>(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = left ^ (philox(key, round << 60 | right).word[0] & mask);
      left = right;
      right = mixed;
    }
    value = left << half | right;
  } while (value >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(value);
}

void fill_normal(Tensor& out, uint64_t seed, std::string_view name, double std, int64_t first) {
  PITH_CHECK(out.defined() && out.is_contiguous() && first >= 0,
      "fill_normal needs a contiguous tensor and an index >= 0; {}, index {}", describe(out, name),
      first);
  const uint64_t key = stream_key(seed, name);
  const int64_t n = out.numel();
  const at::ScalarType dtype = out.scalar_type();
#if PITH_CUDA
  if (out.is_cuda() && (dtype == at::kFloat || dtype == at::kBFloat16)) {
    const c10::cuda::CUDAGuard guard(out.device());
    cuda::fill_normal(out.data_ptr(), n, first, key, static_cast<float>(std),
        dtype == at::kBFloat16, c10::cuda::getCurrentCUDAStream());
    return;
  }
#endif
  PITH_CHECK(out.is_cpu(), "fill_normal has no path for {}", describe(out, name));
  const auto std32 = static_cast<float>(std);
  switch (dtype) {
    case at::kFloat:
      return fill(out.data_ptr<float>(), n, first, key, std32);
    case at::kDouble:
      return fill(out.data_ptr<double>(), n, first, key, std32);
    case at::kBFloat16:
      return fill(out.data_ptr<at::BFloat16>(), n, first, key, std32);
    case at::kHalf:
      return fill(out.data_ptr<at::Half>(), n, first, key, std32);
    default:
      PITH_FAIL("fill_normal has no path for {}", describe(out, name));
  }
}

}  // namespace pith
