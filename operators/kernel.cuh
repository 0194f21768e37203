// What the kernels share. nvcc unrolls short loops of constant length without being told.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <initializer_list>
#include <source_location>
#include "operators/kernels.h"

namespace pith::cuda {

using bf16 = __nv_bfloat16;
constexpr int kWarp = 32;

inline void check(
  cudaError_t error, const char* what, std::source_location at = std::source_location::current()) {
  if (error != cudaSuccess) fail(what, cudaGetErrorString(error), at.file_name(), at.line());
}

// Reports a bad configuration; faults inside appear at a later call.
inline void launch_check(
  const char* kernel, std::source_location at = std::source_location::current()) {
  check(cudaGetLastError(), kernel, at);
}

// N neighbours, moved by one instruction where they fill 4, 8 or 16 bytes.
template <class T, int N> struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

template <class T> inline constexpr int kFull = 16 / int(sizeof(T));

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
template <class T> __device__ inline T from_float(float x) {
  if constexpr (sizeof(T) == 4) return x;
  else return __float2bfloat16_rn(x);
}

template <int N, class T> __device__ inline Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, class T> __device__ inline void store(T* p, const Vec<T, N>& x) {
  *reinterpret_cast<Vec<T, N>*>(p) = x;
}

// Relative error about 1e-6: exact forms would take as long as the memory.
__device__ inline float exp_minus(float x) {
  float power;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.442695041f));
  return power;
}
__device__ inline float inverse(float x) {
  float inverse;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}
__device__ inline float at_most(float x, float limit) { // or NaN
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(limit));
  return least;
}
__device__ inline float clamped(float x, float limit) {
  return -at_most(-at_most(x, limit), limit);
}

// f over LANES (a power of two up to 32) neighbouring threads; each gets the same bits.
template <int LANES, class T, class F> __device__ inline T lanes_reduce(T x, F&& f) {
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    x = f(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}
template <int LANES, class T> __device__ inline T lanes_sum(T x) {
  return lanes_reduce<LANES>(x, [](T a, T b) { return a + b; });
}

// Whether pointers and strides allow vectors of N elements of T.
template <class T, int N>
bool aligned(std::initializer_list<const void*> pointers, std::initializer_list<int64_t> strides) {
  for (const void* p: pointers)
    if (reinterpret_cast<uintptr_t>(p) % (sizeof(T) * N) != 0) return false;
  for (int64_t stride: strides)
    if (stride % N != 0) return false;
  return true;
}

// Calls f<T, N>(): T = bf16 or float, N elements of 16 bytes, at most MOST, or 1 if unaligned.
template <int MOST = 8, class F> void with_vectors(bool is_bf16,
  std::initializer_list<const void*> pointers, std::initializer_list<int64_t> strides, F&& f,
  std::source_location at = std::source_location::current()) {
  const auto choose = [&]<class T>() {
    constexpr int kN = kFull<T> < MOST ? kFull<T> : MOST;
    const bool fits = aligned<uint8_t, 16>(pointers, {}) && aligned<T, kN>({}, strides);
    fits ? f.template operator()<T, kN>() : f.template operator()<T, 1>();
  };
  is_bf16 ? choose.template operator()<bf16>() : choose.template operator()<float>();
  launch_check(at.function_name(), at);
}

inline unsigned num_blocks(int64_t n, int64_t each) { return unsigned((n + each - 1) / each); }

// A block: width(columns) columns of several rows. Rows are on grid.x: it alone reaches 2^31.
struct RowGrid {
  dim3 grid, block;
};
inline RowGrid row_grid(int64_t rows, int64_t columns) {
  constexpr int64_t kThreads = 256;
  const int64_t x = columns < kThreads ? columns : kThreads, y = kThreads / x;
  return {dim3(num_blocks(rows, y), num_blocks(columns, x)), dim3(unsigned(x), unsigned(y))};
}
}
