// Biases of experts: added to their rows, and their gradients. Bound by memory.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

constexpr int kRows = 8;    // of a block side by side: kWarp x kRows threads
constexpr int kSplit = 16;  // blocks that share the rows of an expert

// Block (columns, expert, part of its rows).
template <class T, int N>
__global__ void bias_kernel(const T* bias, const int32_t* offsets, T* y, int64_t columns) {
  const int64_t expert = blockIdx.y, begin = expert == 0 ? 0 : offsets[expert - 1];
  const int64_t column = (blockIdx.x * int64_t{kWarp} + threadIdx.x) * N;
  if (column >= columns) return;
  const Vec<T, N> b = load<N>(bias + expert * columns + column);
  const int64_t first = begin + blockIdx.z * kRows + threadIdx.y;
  for (int64_t row = first; row < offsets[expert]; row += kSplit * kRows) {
    Vec<T, N> out = load<N>(y + row * columns + column);
    for (int j = 0; j < N; ++j) out.v[j] = from_float<T>(to_float(out.v[j]) + to_float(b.v[j]));
    store(y + row * columns + column, out);
  }
}

// Block (columns, expert).
template <class T, int N>
__global__ void sum_kernel(const T* dy, const int32_t* offsets, float* sums, int64_t columns) {
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

void add_expert_bias(const void* bias, const int32_t* offsets, void* y, int64_t experts,
    int64_t columns, bool is_bf16, CUstream_st* stream) {
  if (experts * columns == 0) return;
  with_vectors(is_bf16, {bias, y}, {columns}, [&]<class T, int N>() {
    const dim3 grid(num_blocks(columns, kWarp * N), static_cast<unsigned>(experts), kSplit);
    bias_kernel<T, N><<<grid, dim3(kWarp, kRows), 0, stream>>>(
        static_cast<const T*>(bias), offsets, static_cast<T*>(y), columns);
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
