#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {
constexpr int kThreads = 256;

__device__ inline float update(float w, float& m, float& v, float g, const AdamWScalars<float>& s) {
  m = s.beta1 * m + s.rest1 * g;
  v = s.beta2 * v + s.rest2 * g * g;
  w -= s.decay * w;
  return w - s.rate * m / (sqrtf(v) * s.inverse_correction2 + s.epsilon);
}

template <class T, class M, int N> __global__ void __launch_bounds__(kThreads)
  adamw_kernel(float* master, M* exp_avg, M* exp_avg_sq, const float* grad, T* value, int64_t n,
    const float* grad_scale, AdamWScalars<float> scalars) {
  const int64_t i = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * N;
  if (i >= n) return;
  Vec<float, N> w = load<N>(master + i);
  Vec<M, N> first = load<N>(exp_avg + i), second = load<N>(exp_avg_sq + i);
  const Vec<float, N> g = load<N>(grad + i);
  const float scale = *grad_scale;
  Vec<T, N> rounded;
  for (int j = 0; j < N; ++j) {
    float m = to_float(first.v[j]), v = to_float(second.v[j]);
    w.v[j] = update(w.v[j], m, v, g.v[j] * scale, scalars);
    rounded.v[j] = from_float<T>(w.v[j]);
    first.v[j] = from_float<M>(m);
    second.v[j] = from_float<M>(v);
  }
  store(master + i, w);
  store(exp_avg + i, first);
  store(exp_avg_sq + i, second);
  store(value + i, rounded);
}

constexpr int kSumBlocks = 1056; // of no device: one order of summation on all

// In a fixed order, valid in thread 0.
__device__ double block_sum(double x) {
  __shared__ double warp_sums[kThreads / 32];
  x = lanes_sum<32>(x);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0)
    for (double part: warp_sums) sum += part;
  return sum;
}

template <int N> __global__ void __launch_bounds__(kThreads)
  squares_kernel(const float* x, int64_t n, double* partial) {
  constexpr int kUnroll = 4;
  const int64_t stride = int64_t{kSumBlocks} * kThreads * N;
  int64_t i = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * N;
  double sum = 0;
  for (; i + (kUnroll - 1) * stride + N <= n; i += kUnroll * stride) {
    Vec<float, N> loaded[kUnroll];
    for (int k = 0; k < kUnroll; ++k) loaded[k] = load<N>(x + i + k * stride);
    for (int k = 0; k < kUnroll; ++k)
      for (int j = 0; j < N; ++j) {
        const double value = loaded[k].v[j];
        sum += value * value;
      }
  }
  for (; i < n; i += stride)
    for (int64_t j = i; j < i + N && j < n; ++j) sum += double(x[j]) * x[j];
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) total_kernel(const double* partial, double* result) {
  double sum = 0;
  for (int i = threadIdx.x; i < kSumBlocks; i += kThreads) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *result = sum;
}
}

void adamw_update(float* master, void* exp_avg, void* exp_avg_sq, const float* grad, void* value,
  int64_t n, const float* grad_scale, const AdamWScalars<float>& scalars, bool is_bf16,
  bool bf16_moments, CUstream_st* stream) {
  with_vectors<4>(is_bf16, {master, exp_avg, exp_avg_sq, grad, value}, {n}, [&]<class T, int N>() {
    const auto launch = [&]<class M>() {
      adamw_kernel<T, M, N><<<num_blocks(n, kThreads * N), kThreads, 0, stream>>>(master,
        static_cast<M*>(exp_avg), static_cast<M*>(exp_avg_sq), grad, static_cast<T*>(value), n,
        grad_scale, scalars);
    };
    bf16_moments ? launch.template operator()<bf16>() : launch.template operator()<float>();
  });
  launch_check("adamw");
}

int64_t sum_of_squares_blocks() { return kSumBlocks; }

void sum_of_squares(
  const float* x, int64_t n, double* partial, double* result, CUstream_st* stream) {
  const auto squares = aligned<float, 4>({x}, {}) ? squares_kernel<4> : squares_kernel<1>;
  squares<<<kSumBlocks, kThreads, 0, stream>>>(x, n, partial);
  total_kernel<<<1, kThreads, 0, stream>>>(partial, result);
  launch_check("sum_of_squares");
}
}
