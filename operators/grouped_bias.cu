// Biases of experts: added to their rows, and their gradients. Bound by memory.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

constexpr int kRows = 8;  // of a block: it sums rows i, i + kRows, ...

template <class T, int N>
__global__ void bias_kernel(const T* bias, const int32_t* offsets, T* y, int64_t rows,
    int64_t experts, int64_t columns) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * N;
  if (row >= rows || column >= columns) return;
  int64_t expert = 0, end = experts - 1;  // the first whose rows end after this one
  while (expert < end) {
    const int64_t middle = (expert + end) / 2;
    if (offsets[middle] > row)
      end = middle;
    else
      expert = middle + 1;
  }
  const Vec<T, N> b = load<N>(bias + expert * columns + column);
  Vec<T, N> out = load<N>(y + row * columns + column);
  for (int j = 0; j < N; ++j) out.v[j] = from_float<T>(to_float(out.v[j]) + to_float(b.v[j]));
  store(y + row * columns + column, out);
}

// Block (columns, expert) of kWarp x kRows threads.
template <class T, int N>
__global__ void sum_kernel(
    const T* dy, const int32_t* offsets, float* sums, int64_t columns) {
  __shared__ float part[kRows][kWarp * N];
  const int64_t expert = blockIdx.y, begin = expert == 0 ? 0 : offsets[expert - 1];
  const int64_t end = offsets[expert];
  const int64_t column = (blockIdx.x * int64_t{kWarp} + threadIdx.x) * N;
  float total[N] = {};
  for (int64_t row = begin + threadIdx.y; row < end && column < columns; row += kRows) {
    const Vec<T, N> x = load<N>(dy + row * columns + column);
    for (int j = 0; j < N; ++j) total[j] += to_float(x.v[j]);
  }
  for (int j = 0; j < N; ++j) part[threadIdx.y][threadIdx.x * N + j] = total[j];
  __syncthreads();
  if (threadIdx.y > 0 || column >= columns || begin == end) return;
  for (int j = 0; j < N; ++j) {
    for (int i = 1; i < kRows; ++i) total[j] += part[i][threadIdx.x * N + j];
    sums[expert * columns + column + j] += total[j];
  }
}

}  // namespace

void add_expert_bias(const void* bias, const int32_t* offsets, void* y, int64_t rows,
    int64_t experts, int64_t columns, bool is_bf16, CUstream_st* stream) {
  if (rows * columns == 0) return;
  with_vectors(is_bf16, {bias, y}, {columns}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, columns / N);
    bias_kernel<T, N><<<shape.grid, shape.block, 0, stream>>>(
        static_cast<const T*>(bias), offsets, static_cast<T*>(y), rows, experts, columns);
  });
  launch_check("add_expert_bias");
}

void add_expert_sums(const void* dy, const int32_t* offsets, float* sums, int64_t experts,
    int64_t columns, bool is_bf16, CUstream_st* stream) {
  if (experts * columns == 0) return;
  with_vectors(is_bf16, {dy}, {columns}, [&]<class T, int N>() {
    const dim3 grid(num_blocks(columns, kWarp * N), static_cast<unsigned>(experts));
    sum_kernel<T, N><<<grid, dim3(kWarp, kRows), 0, stream>>>(
        static_cast<const T*>(dy), offsets, sums, columns);
  });
  launch_check("add_expert_sums");
}

}  // namespace pith::cuda
