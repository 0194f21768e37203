// Gradient of the embedding: rows of equal tokens summed in order, without atomics.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

constexpr int kThreads = 128, kUnroll = 8;

// Block (i, c) sums columns c for the run of equal tokens that begins at i; others leave at once.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) add_rows_kernel(const int64_t* sorted,
    const int64_t* position, const T* dy, float* grad, int64_t num_tokens, int64_t hidden) {
  const int64_t begin = blockIdx.x;
  const int64_t column = (blockIdx.y * int64_t{kThreads} + threadIdx.x) * N;
  const int64_t token = sorted[begin];
  if (column >= hidden || (begin > 0 && sorted[begin - 1] == token)) return;
  float sum[N] = {};
  bool more = true;
  for (int64_t i = begin; more; i += kUnroll) {
    Vec<T, N> row[kUnroll];  // several loads in flight
    bool valid[kUnroll];
    for (int k = 0; k < kUnroll; ++k) {
      valid[k] = i + k < num_tokens && sorted[i + k] == token;
      if (valid[k]) row[k] = load<N>(dy + position[i + k] * hidden + column);
    }
    for (int k = 0; k < kUnroll; ++k)
      for (int j = 0; j < N; ++j)
        if (valid[k]) sum[j] += to_float(row[k].v[j]);
    more = valid[kUnroll - 1];
  }
  float* target = grad + token * hidden + column;
  Vec<float, N> total = load<N>(target);
  for (int j = 0; j < N; ++j) total.v[j] += sum[j];
  store(target, total);
}

}  // namespace

void add_rows_by_token(const int64_t* sorted, const int64_t* position, const void* dy, float* grad,
    int64_t num_tokens, int64_t hidden, bool is_bf16, CUstream_st* stream) {
  if (num_tokens == 0 || hidden == 0) return;
  with_vectors<4>(is_bf16, {grad, dy}, {hidden}, [&]<class T, int N>() {
    const dim3 grid(static_cast<unsigned>(num_tokens), num_blocks(hidden, kThreads * N));
    add_rows_kernel<T, N><<<grid, kThreads, 0, stream>>>(
        sorted, position, static_cast<const T*>(dy), grad, num_tokens, hidden);
  });
  launch_check("embedding: add_rows_by_token");
}

}  // namespace pith::cuda
