// What the memory-bound kernels share: 16-byte vectors of float or bfloat16, sums over a warp,
// launch shapes.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <initializer_list>

namespace pith::cuda {

using bf16 = __nv_bfloat16;

// N neighbouring elements, moved by one instruction where they fill 4, 8 or 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// Elements of T in 16 bytes.
template <class T>
inline constexpr int kFull = 16 / static_cast<int>(sizeof(T));

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ inline T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <int N, class T>
__device__ inline Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, class T>
__device__ inline void store(T* p, const Vec<T, N>& x) {
  *reinterpret_cast<Vec<T, N>*>(p) = x;
}

// Sum over LANES (a power of two up to 32) neighbouring threads; each of them gets the same bits.
template <int LANES, class T>
__device__ inline T lanes_sum(T x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// Whether vectors of N elements of T reach every row: pointers and strides (in elements) are
// multiples.
template <class T, int N>
bool aligned(std::initializer_list<const void*> pointers, std::initializer_list<int64_t> strides) {
  for (const void* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % (sizeof(T) * N) != 0) return false;
  }
  for (int64_t stride : strides) {
    if (stride % N != 0) return false;
  }
  return true;
}

// Threads over (rows, columns): a block covers width(columns) columns of several rows. Rows lie on
// grid.x, the only grid dimension that reaches 2^31.
struct RowGrid {
  dim3 grid, block;
};
inline RowGrid row_grid(int64_t rows, int64_t columns) {
  constexpr int64_t kThreads = 256;
  const int64_t x = columns < kThreads ? columns : kThreads, y = kThreads / x;
  return {
      dim3(static_cast<unsigned>((rows + y - 1) / y), static_cast<unsigned>((columns + x - 1) / x)),
      dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}

}  // namespace pith::cuda
