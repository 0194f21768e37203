// Cross-entropy over rows of FP32 logits, which its gradient overwrites.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int64_t kIgnored = -100;

// exp(x - top) summed, relative to the largest x so far.
struct SoftmaxSum {
  float top = -INFINITY, sum = 0;
};

__device__ inline SoftmaxSum combine(SoftmaxSum a, SoftmaxSum b) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {};
  return {top, a.sum * __expf(a.top - top) + b.sum * __expf(b.top - top)};
}

// Over the block, in a fixed order; every thread gets the same bits.
__device__ inline SoftmaxSum block_combine(SoftmaxSum x) {
  __shared__ SoftmaxSum part[kWarps];
  for (int distance = 16; distance > 0; distance /= 2)
    x = combine(x, {__shfl_xor_sync(0xffffffffu, x.top, distance),
                       __shfl_xor_sync(0xffffffffu, x.sum, distance)});
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  SoftmaxSum all = part[0];
  for (int w = 1; w < kWarps; ++w) all = combine(all, part[w]);
  return all;
}

// One block a row. An instruction reads N logits, or writes N numbers of the gradient (type G).
template <class G, int N>
__global__ __launch_bounds__(kThreads) void cross_entropy_kernel(float* __restrict__ logits,
    const int64_t* __restrict__ labels, float* __restrict__ logprobs, int64_t vocabulary,
    bool gradient) {
  constexpr int kVectors = 8 / N;  // loads in flight
  float* row = logits + blockIdx.x * vocabulary;
  G* out = reinterpret_cast<G*>(row);
  const int64_t label = labels[blockIdx.x];
  const bool trained = label >= 0 && label < vocabulary;
  if (!trained) {
    if (threadIdx.x == 0) logprobs[blockIdx.x] = label == kIgnored ? 0.0f : NAN;
    if (!gradient) return;
    for (int64_t i = threadIdx.x; i < vocabulary; i += kThreads) out[i] = from_float<G>(0.0f);
    return;
  }

  SoftmaxSum mine;
  for (int64_t base = 0; base < vocabulary; base += kThreads * 8) {
    Vec<float, N> x[kVectors];
    for (int u = 0; u < kVectors; ++u) {
      const int64_t i = base + (u * kThreads + threadIdx.x) * N;
      for (int n = 0; n < N; ++n) x[u].v[n] = -INFINITY;
      if (i < vocabulary) x[u] = load<N>(row + i);
    }
    float top = mine.top;
    for (int u = 0; u < kVectors; ++u)
      for (int n = 0; n < N; ++n) top = fmaxf(top, x[u].v[n]);
    if (top == -INFINITY) continue;
    float sum = mine.sum * __expf(mine.top - top);
    for (int u = 0; u < kVectors; ++u)
      for (int n = 0; n < N; ++n) sum += __expf(x[u].v[n] - top);
    mine = {top, sum};
  }
  const SoftmaxSum all = block_combine(mine);
  const float lse = all.top + logf(all.sum);
  if (threadIdx.x == 0) logprobs[blockIdx.x] = row[label] - lse;
  if (!gradient) return;

  // The gradient of a tile goes to bytes of this tile and of earlier ones (G is no larger than
  // float), all of which have been read when the barrier is passed. A thread takes 8 neighbours.
  __syncthreads();  // row[label] was read
  for (int64_t base = 0; base < vocabulary; base += kThreads * 8) {
    const int64_t first = base + threadIdx.x * 8;
    float x[8];
    for (int u = 0; u < 8; u += N) {
      if (first + u >= vocabulary) break;
      const Vec<float, N> part = load<N>(row + first + u);
      for (int n = 0; n < N; ++n) x[u + n] = part.v[n];
    }
    __syncthreads();
    for (int u = 0; u < 8; u += N) {
      if (first + u >= vocabulary) break;
      Vec<G, N> result;
      for (int n = 0; n < N; ++n) {
        const float p = __expf(x[u + n] - lse);
        result.v[n] = from_float<G>(first + u + n == label ? p - 1.0f : p);
      }
      store(out + first + u, result);
    }
  }
}

}  // namespace

void cross_entropy_rows(float* logits, const int64_t* labels, float* logprobs, int64_t rows,
    int64_t vocabulary, bool gradient, bool is_bf16, cudaStream_t stream) {
  if (rows == 0) return;
  const bool full = aligned<float, 4>({logits}, {vocabulary});
  const auto kernel =
      is_bf16 ? (full ? cross_entropy_kernel<bf16, 4> : cross_entropy_kernel<bf16, 1>)
              : (full ? cross_entropy_kernel<float, 4> : cross_entropy_kernel<float, 1>);
  kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
      logits, labels, logprobs, vocabulary, gradient);
  launch_check("cross_entropy_rows");
}

}  // namespace pith::cuda
