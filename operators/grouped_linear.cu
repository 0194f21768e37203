// Biases of grouped linear maps where grouped_product() does not add them.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {
constexpr int kRows = 8; // of a block: kWarp x kRows threads
constexpr int kSplit = 16; // blocks that share an expert's rows

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
}

void add_expert_bias(Data bias, const int32_t* offsets, Data y, int64_t experts, int64_t columns) {
  if (experts * columns == 0) return;
  with_vectors(y.bf16, {bias, y}, {columns}, [&]<class T, int N>() {
    const dim3 grid(num_blocks(columns, kWarp * N), unsigned(experts), kSplit);
    bias_kernel<T, N><<<grid, dim3(kWarp, kRows), 0, current_stream()>>>(bias, offsets, y, columns);
  });
}
}
