// Rotary embedding: every thread turns N pairs of one head.
#include "operators/cuda_check.h"
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

template <class T, int N>
__global__ void rotary_kernel(const T* x, const int32_t* positions, const float* cos,
                              const float* sin, T* y, int64_t rows, int heads, int half,
                              int64_t row_stride, int64_t head_stride, int64_t table_rows,
                              float sign) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int chunks = half / N;
  const int place = blockIdx.y * blockDim.x + threadIdx.x;  // of (heads, chunks)
  if (row >= rows || place >= heads * chunks) return;
  const int head = place / chunks, i = place % chunks * N;
  const T* from = x + row * row_stride + head * head_stride + i;
  T* to = y + (row * heads + head) * 2 * half + i;
  const Vec<T, N> a = load<N>(from), b = load<N>(from + half);
  const int64_t position = positions[row];
  const bool inside = position >= 0 && position < table_rows;
  const int64_t at = (inside ? position : 0) * half + i;
  Vec<T, N> first, second;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float c = inside ? cos[at + j] : nanf(""), s = sign * sin[at + j];
    const float left = to_float(a.v[j]), right = to_float(b.v[j]);
    first.v[j] = from_float<T>(left * c - right * s);
    second.v[j] = from_float<T>(right * c + left * s);
  }
  store(to, first);
  store(to + half, second);
}

}  // namespace

void rotary(const void* x, const int32_t* positions, const float* cos, const float* sin, void* y,
            int64_t rows, int64_t heads, int64_t dim, int64_t row_stride, int64_t head_stride,
            int64_t table_rows, bool inverse, bool is_bf16, CUstream_st* stream) {
  if (rows * heads * dim == 0) return;
  const int64_t half = dim / 2;
  const auto launch = [&](auto kernel, auto type, int64_t n) {
    using T = decltype(type);
    const RowGrid shape = row_grid(rows, heads * (half / n));
    kernel<<<shape.grid, shape.block, 0, stream>>>(
        static_cast<const T*>(x), positions, cos, sin, static_cast<T*>(y), rows,
        static_cast<int>(heads), static_cast<int>(half), row_stride, head_stride, table_rows,
        inverse ? -1.0f : 1.0f);
    launch_check("rotary");
  };
  if (is_bf16) {
    constexpr int kN = kFull<bf16>;
    const bool fits = aligned<bf16, kN>({x, y}, {half, row_stride, head_stride});
    fits ? launch(rotary_kernel<bf16, kN>, bf16{}, kN) : launch(rotary_kernel<bf16, 1>, bf16{}, 1);
  } else {
    constexpr int kN = kFull<float>;
    const bool fits = aligned<float, kN>({x, y}, {half, row_stride, head_stride});
    fits ? launch(rotary_kernel<float, kN>, float{}, kN)
         : launch(rotary_kernel<float, 1>, float{}, 1);
  }
}

}  // namespace pith::cuda
