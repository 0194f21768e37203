// A thread turns N pairs of one head.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {
// Two vectors hold N pairs: N of each half, or 2 N neighbours.
template <class T, int N, bool NEIGHBOURS> __global__ void rotary_kernel(const T* x,
  const int32_t* positions, const float* cos, const float* sin, T* y, int64_t rows, int heads,
  int half, int64_t row_stride, int64_t head_stride, int64_t y_head_stride, int64_t table_rows,
  float sign) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int chunks = half / N;
  const int place = blockIdx.y * blockDim.x + threadIdx.x; // of (heads, chunks)
  if (row >= rows || place >= heads * chunks) return;
  const int head = place / chunks, i = place % chunks * N;
  const int begin = NEIGHBOURS ? 2 * i : i, apart = NEIGHBOURS ? N : half;
  const T* from = x + row * row_stride + head * head_stride + begin;
  T* to = y + (row * heads + head) * y_head_stride + begin;
  const Vec<T, N> in[2] = {load<N>(from), load<N>(from + apart)};
  const int64_t position = positions[row];
  const bool inside = position >= 0 && position < table_rows;
  const int64_t at = (inside ? position : 0) * half + i;
  Vec<T, N> out[2];
  for (int j = 0; j < N; ++j) {
    const float c = inside ? cos[at + j] : nanf(""), s = sign * sin[at + j];
    const int a = NEIGHBOURS ? 2 * j : j, b = NEIGHBOURS ? 2 * j + 1 : N + j;
    const float left = to_float(in[a / N].v[a % N]), right = to_float(in[b / N].v[b % N]);
    out[a / N].v[a % N] = from_float<T>(left * c - right * s);
    out[b / N].v[b % N] = from_float<T>(right * c + left * s);
  }
  store(to, out[0]);
  store(to + apart, out[1]);
}
}

void rotary(Data x, const int32_t* positions, const float* cos, const float* sin, Data y,
  int64_t rows, int64_t heads, int64_t dim, int64_t row_stride, int64_t head_stride,
  int64_t y_head_stride, int64_t table_rows, bool neighbours, bool inverse) {
  if (rows * heads * dim == 0) return;
  const int64_t half = dim / 2;
  const auto strides = {half, row_stride, head_stride, y_head_stride};
  with_vectors(x.bf16, {x, y}, strides, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, heads * (half / N));
    const auto kernel = neighbours ? rotary_kernel<T, N, true> : rotary_kernel<T, N, false>;
    kernel<<<shape.grid, shape.block, 0, current_stream()>>>(x, positions, cos, sin, y, rows,
      int(heads), int(half), row_stride, head_stride, y_head_stride, table_rows,
      inverse ? -1.0f : 1.0f);
  });
}
}
