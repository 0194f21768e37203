// A warp a row of expert scores, held in registers.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {
constexpr int kWarpsPerBlock = 4;

// Orders (score, id) as integers: larger score, then lower id. NaN is below -inf, 0 below all.
__device__ inline uint64_t order_key(float score, int id) {
  uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score); // -0 equals 0
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (isnan(score)) bits = 0;
  return uint64_t{bits} << 32 | (0xffffffffu - uint32_t(id));
}

// score[i] of lane l: expert l + 32 i. Calls chosen(j, id) for the k best, in order.
template <int N, class F>
__device__ inline void select_topk(const float (&score)[N], int num_experts, int k, F&& chosen) {
  const int lane = threadIdx.x % kWarp;
  uint64_t key[N];
  for (int i = 0; i < N; ++i) {
    const int id = lane + kWarp * i;
    key[i] = id < num_experts ? order_key(score[i], id) : 0;
  }
  for (int j = 0; j < k; ++j) {
    uint64_t best = 0;
    for (int i = 0; i < N; ++i) best = key[i] > best ? key[i] : best;
    best = lanes_reduce<kWarp>(best, [](uint64_t a, uint64_t b) { return b > a ? b : a; });
    for (int i = 0; i < N; ++i) key[i] = key[i] == best ? 0 : key[i]; // keys are unique
    chosen(j, int(0xffffffffu - uint32_t(best)));
  }
}

template <int N> __global__ void route_forward_kernel(const float* __restrict__ logits,
  const int64_t* __restrict__ forced, float* __restrict__ probabilities, int64_t* __restrict__ idx,
  float* __restrict__ weight, int64_t rows, int num_experts, int k, bool normalize) {
  const int lane = threadIdx.x % kWarp;
  const int64_t row = blockIdx.x * int64_t{kWarpsPerBlock} + threadIdx.x / kWarp;
  if (row >= rows) return;
  float logit[N], top = -INFINITY;
  for (int i = 0; i < N; ++i) {
    const int id = lane + kWarp * i;
    logit[i] = id < num_experts ? logits[row * num_experts + id] : -INFINITY;
    top = fmaxf(top, logit[i]);
  }
  top = lanes_reduce<kWarp>(top, [](float a, float b) { return fmaxf(a, b); });
  float p[N], sum = 0;
  for (int i = 0; i < N; ++i) sum += p[i] = expf(logit[i] - top); // 0 beyond num_experts
  const float scale = 1.0f / lanes_sum<kWarp>(sum);
  float* out = probabilities + row * num_experts;
  for (int i = 0; i < N; ++i) {
    const int id = lane + kWarp * i;
    if (id < num_experts) out[id] = p[i] *= scale;
  }
  __syncwarp(); // other lanes' probabilities are read below
  if (forced == nullptr) {
    select_topk<N>(logit, num_experts, k, [&](int j, int id) {
      if (lane == 0) idx[row * k + j] = id;
    });
  } else {
    for (int j = lane; j < k; j += kWarp) idx[row * k + j] = forced[row * k + j];
  }
  __syncwarp();
  float chosen = 0;
  for (int j = lane; j < k; j += kWarp) chosen += out[idx[row * k + j]];
  const float total = lanes_sum<kWarp>(chosen);
  for (int j = lane; j < k; j += kWarp) {
    const float value = out[idx[row * k + j]];
    weight[row * k + j] = normalize ? value / total : value;
  }
}

// dlogits = p (dp - <p, dp>), dp the gradient of the probabilities plus, at chosen experts, that of
// the weights: w_j = p_j, or p_j / s with s the sum of the chosen, whose gradient is (dw_j - <w,
// dw>) / s. Those of chosen probabilities are added lane by lane in the order of j: an expert
// forced twice into a row still has one order.
template <int N> __global__ void route_backward_kernel(const float* __restrict__ probabilities,
  const int64_t* __restrict__ idx, const float* __restrict__ dprobabilities,
  const float* __restrict__ dweight, float* __restrict__ dlogits, int64_t rows, int num_experts,
  int k, bool normalize) {
  const int lane = threadIdx.x % kWarp;
  const int64_t row = blockIdx.x * int64_t{kWarpsPerBlock} + threadIdx.x / kWarp;
  if (row >= rows) return;
  float p[N], dp[N];
  for (int i = 0; i < N; ++i) {
    const int id = lane + kWarp * i;
    const int64_t at = row * num_experts + id;
    p[i] = id < num_experts ? probabilities[at] : 0.0f;
    dp[i] = id < num_experts && dprobabilities ? dprobabilities[at] : 0.0f;
  }
  if (dweight != nullptr) {
    const float* all = probabilities + row * num_experts;
    float sum = 0, inner = 0;
    for (int j = lane; j < k; j += kWarp) {
      const float chosen = all[idx[row * k + j]];
      sum += chosen;
      inner += dweight[row * k + j] * chosen;
    }
    sum = lanes_sum<kWarp>(sum);
    inner = lanes_sum<kWarp>(inner);
    for (int j = 0; j < k; ++j) {
      const int id = int(idx[row * k + j]);
      const float dw = dweight[row * k + j];
      const float d = normalize ? (dw - inner / sum) / sum : dw;
      for (int i = 0; i < N; ++i) dp[i] += id == lane + kWarp * i ? d : 0.0f;
    }
  }
  float inner = 0;
  for (int i = 0; i < N; ++i) inner = fmaf(p[i], dp[i], inner);
  inner = lanes_sum<kWarp>(inner);
  for (int i = 0; i < N; ++i) {
    const int id = lane + kWarp * i;
    if (id < num_experts) dlogits[row * num_experts + id] = p[i] * (dp[i] - inner);
  }
}

// f.operator()<N>() with N registers a lane, enough for num_experts <= 1024.
template <class F> void with_registers(int64_t num_experts, F&& f) {
  if (num_experts <= 32) return f.template operator()<1>();
  if (num_experts <= 64) return f.template operator()<2>();
  if (num_experts <= 128) return f.template operator()<4>();
  if (num_experts <= 256) return f.template operator()<8>();
  if (num_experts <= 512) return f.template operator()<16>();
  f.template operator()<32>();
}

constexpr int kThreads = kWarpsPerBlock * kWarp;
}

void route_forward(const float* logits, const int64_t* forced, float* probabilities, int64_t* idx,
  float* weight, int64_t rows, int64_t num_experts, int64_t k, bool normalize) {
  if (rows == 0) return;
  with_registers(num_experts, [&]<int N>() {
    route_forward_kernel<N><<<num_blocks(rows, kWarpsPerBlock), kThreads, 0, current_stream()>>>(
      logits, forced, probabilities, idx, weight, rows, int(num_experts), int(k), normalize);
  });
  launch_check("route_forward");
}

void route_backward(const float* probabilities, const int64_t* idx, const float* dprobabilities,
  const float* dweight, float* dlogits, int64_t rows, int64_t num_experts, int64_t k,
  bool normalize) {
  if (rows == 0) return;
  with_registers(num_experts, [&]<int N>() {
    route_backward_kernel<N>
      <<<num_blocks(rows, kWarpsPerBlock), kThreads, 0, current_stream()>>>(probabilities, idx,
        dprobabilities, dweight, dlogits, rows, int(num_experts), int(k), normalize);
  });
  launch_check("route_backward");
}
}
