#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {
constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int64_t kIgnored = -100;

// exp(x - top) summed; top: the largest x so far.
struct SoftmaxSum {
  float top = -INFINITY, sum = 0;
};

__device__ inline SoftmaxSum combine(SoftmaxSum a, SoftmaxSum b) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {};
  return {top, a.sum * __expf(a.top - top) + b.sum * __expf(b.top - top)};
}

// Over the block, in a fixed order; all get the same bits.
__device__ inline SoftmaxSum block_combine(SoftmaxSum x) {
  __shared__ SoftmaxSum part[kWarps];
  for (int distance = 16; distance > 0; distance /= 2)
    x = combine(x,
      {__shfl_xor_sync(0xffffffffu, x.top, distance),
        __shfl_xor_sync(0xffffffffu, x.sum, distance)});
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  SoftmaxSum all = part[0];
  for (int w = 1; w < kWarps; ++w) all = combine(all, part[w]);
  return all;
}

// A block a row, twice over it: the second time backwards, since L2 still holds its end. N logits
// are read, or numbers of the gradient written, by one instruction.
template <class T, int N> __global__ __launch_bounds__(kThreads, 2) void cross_entropy_kernel(
  T* __restrict__ logits, const int64_t* __restrict__ labels, float* __restrict__ logprobs,
  int64_t vocabulary, bool gradient) {
  constexpr int kVectors = N == 1 ? 8 : 4; // loads in flight
  constexpr int64_t kTile = int64_t{kThreads} * kVectors * N;
  T* row = logits + blockIdx.x * vocabulary;
  const int64_t label = labels[blockIdx.x];
  const bool trained = label >= 0 && label < vocabulary;
  if (!trained) {
    if (threadIdx.x == 0) logprobs[blockIdx.x] = label == kIgnored ? 0.0f : NAN;
    if (!gradient) return;
    for (int64_t i = threadIdx.x; i < vocabulary; i += kThreads) row[i] = from_float<T>(0.0f);
    return;
  }

  Vec<T, N> x[kVectors];
  const auto place = [&](int64_t base, int u) { return base + (u * kThreads + threadIdx.x) * N; };
  const auto load_tile = [&](int64_t base) {
    for (int u = 0; u < kVectors; ++u)
      if (const int64_t i = place(base, u); i < vocabulary) x[u] = load<N>(row + i);
      else
        for (int n = 0; n < N; ++n) x[u].v[n] = from_float<T>(-INFINITY);
  };

  SoftmaxSum mine;
  for (int64_t base = 0; base < vocabulary; base += kTile) {
    load_tile(base);
    float top = mine.top;
    for (int u = 0; u < kVectors; ++u)
      for (int n = 0; n < N; ++n) top = fmaxf(top, to_float(x[u].v[n]));
    if (top == -INFINITY) continue;
    float sum = mine.sum * __expf(mine.top - top);
    for (int u = 0; u < kVectors; ++u)
      for (int n = 0; n < N; ++n) sum += __expf(to_float(x[u].v[n]) - top);
    mine = {top, sum};
  }
  const SoftmaxSum all = block_combine(mine);
  const float lse = all.top + logf(all.sum);
  if (threadIdx.x == 0) logprobs[blockIdx.x] = to_float(row[label]) - lse;
  if (!gradient) return;

  __syncthreads(); // row[label] was read
  for (int64_t base = (vocabulary - 1) / kTile * kTile; base >= 0; base -= kTile) {
    load_tile(base);
    for (int u = 0; u < kVectors; ++u) {
      const int64_t i = place(base, u);
      if (i >= vocabulary) break;
      Vec<T, N> result;
      for (int n = 0; n < N; ++n) {
        const float p = __expf(to_float(x[u].v[n]) - lse);
        result.v[n] = from_float<T>(i + n == label ? p - 1.0f : p);
      }
      store(row + i, result);
    }
  }
}
}

void cross_entropy_rows(Data logits, const int64_t* labels, float* logprobs, int64_t rows,
  int64_t vocabulary, bool gradient) {
  if (rows == 0) return;
  with_vectors(logits.bf16, {logits}, {vocabulary}, [&]<class T, int N>() {
    cross_entropy_kernel<T, N><<<unsigned(rows), kThreads, 0, current_stream()>>>(
      logits, labels, logprobs, vocabulary, gradient);
  });
}
}
