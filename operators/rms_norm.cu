// A row is in registers of LANES threads of a warp if short (per-head norms), else of a block.
#include <algorithm>
#include <climits>
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {
constexpr int kGroupThreads = 128; // of a block with several rows

// LANES threads a row (0: a block, up to MOST) with PER vectors of N, at (k * threads + lane) * N.
template <int N_, int LANES_, int PER_, int MOST_ = kGroupThreads> struct Spread {
  static constexpr int N = N_, LANES = LANES_, PER = PER_, MOST = MOST_;
};

template <class S> __device__ inline int group_size() {
  return S::LANES == 0 ? blockDim.x : S::LANES;
}
template <class S> __device__ inline int lane() {
  return S::LANES == 0 ? threadIdx.x : threadIdx.x % group_size<S>();
}

// f(k, j) for this thread's vectors; the k-th begins at element j.
template <class S, class F> __device__ inline void for_vectors(int64_t dim, F&& f) {
  for (int k = 0; k < S::PER; ++k) {
    const int j = (k * group_size<S>() + lane<S>()) * S::N;
    if (j < dim) f(k, j);
  }
}

// Over a row's threads; each gets the same bits.
template <int LANES> __device__ inline float row_sum(float x) {
  if constexpr (LANES > 0) {
    return lanes_sum<LANES>(x);
  } else {
    __shared__ float warp_sums[32];
    x = lanes_sum<32>(x);
    __syncthreads(); // sums before have been read
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? warp_sums[threadIdx.x % 32] : 0.0f;
    return lanes_sum<32>(x);
  }
}

__device__ inline int64_t row_start(const NormRows& rows, int64_t r) {
  if (rows.inner == 1) return r * rows.outer_stride;
  if (r <= INT_MAX) { // 32-bit division costs a third
    const auto row = unsigned(r), inner = unsigned(rows.inner);
    return row / inner * rows.outer_stride + row % inner * rows.inner_stride;
  }
  return r / rows.inner * rows.outer_stride + r % rows.inner * rows.inner_stride;
}

template <class T, class S> __global__ void __launch_bounds__(S::MOST) forward_kernel(
  const T* x, NormRows rows, const T* weight, float plus, float eps, T* y, float* rstd) {
  const int rows_per_block = blockDim.x / group_size<S>();
  const int64_t r = blockIdx.x * int64_t{rows_per_block} + threadIdx.x / group_size<S>();
  const bool valid = r < rows.count; // others stay for the shuffles
  const T* from = x + row_start(rows, valid ? r : 0);
  Vec<T, S::N> cached[S::PER];
  float squares = 0;
  for_vectors<S>(rows.dim, [&](int k, int j) { cached[k] = load<S::N>(from + j); });
  for_vectors<S>(rows.dim, [&](int k, int) {
    for (int i = 0; i < S::N; ++i) squares += to_float(cached[k].v[i]) * to_float(cached[k].v[i]);
  });
  squares = row_sum<S::LANES>(squares);
  const float scale = 1.0f / sqrtf(squares / float(rows.dim) + eps);
  if (!valid) return;
  if (lane<S>() == 0) rstd[r] = scale;
  for_vectors<S>(rows.dim, [&](int k, int j) {
    const Vec<T, S::N> w = load<S::N>(weight + j);
    for (int i = 0; i < S::N; ++i)
      cached[k].v[i] = from_float<T>(to_float(cached[k].v[i]) * scale * (to_float(w.v[i]) + plus));
    store(y + r * rows.dim + j, cached[k]);
  });
}

// A block takes rows a grid apart, keeps dweight's sums in registers, writes a row of `partial`.
template <class T, class S> __global__ void __launch_bounds__(S::MOST)
  backward_kernel(const T* x, NormRows rows, const T* weight, float plus, const float* rstd,
    const T* dy, T* dx, float* partial) {
  constexpr int N = S::N;
  const int group = threadIdx.x / group_size<S>(), num_groups = blockDim.x / group_size<S>();
  float sums[S::PER][N] = {};
  const int64_t first = blockIdx.x * int64_t{num_groups};
  for (int64_t base = first; base < rows.count; base += int64_t{gridDim.x} * num_groups) {
    const int64_t r = base + group;
    const bool valid = r < rows.count;
    const T* from = x + row_start(rows, valid ? r : 0);
    const T* gradient = dy + (valid ? r : 0) * rows.dim;
    const float scale = valid ? rstd[r] : 0.0f;
    Vec<T, N> a[S::PER], d[S::PER];
    for_vectors<S>(rows.dim, [&](int k, int j) {
      a[k] = load<N>(from + j);
      d[k] = load<N>(gradient + j);
    });
    float projection = 0; // sum of dy w n, n = x rstd
    for_vectors<S>(valid ? rows.dim : 0, [&](int k, int j) {
      const Vec<T, N> w = load<N>(weight + j);
      for (int i = 0; i < N; ++i) {
        const float product = to_float(d[k].v[i]) * (to_float(a[k].v[i]) * scale);
        sums[k][i] += product;
        projection += product * (to_float(w.v[i]) + plus);
      }
    });
    if (dx == nullptr) continue;
    projection = row_sum<S::LANES>(projection) / float(rows.dim);
    for_vectors<S>(valid ? rows.dim : 0, [&](int k, int j) {
      const Vec<T, N> w = load<N>(weight + j);
      Vec<T, N> out;
      for (int i = 0; i < N; ++i) {
        const float g = to_float(d[k].v[i]) * (to_float(w.v[i]) + plus);
        out.v[i] = from_float<T>(scale * (g - to_float(a[k].v[i]) * scale * projection));
      }
      store(dx + r * rows.dim + j, out);
    });
  }
  // The block's groups add up one after the other: a fixed order.
  extern __shared__ float columns[];
  for (int turn = 0; turn < num_groups; ++turn) {
    for_vectors<S>(group == turn ? rows.dim : 0, [&](int k, int j) {
      for (int i = 0; i < N; ++i)
        columns[j + i] = turn == 0 ? sums[k][i] : columns[j + i] + sums[k][i];
    });
    __syncthreads();
  }
  for (int j = threadIdx.x; j < rows.dim; j += blockDim.x)
    partial[blockIdx.x * rows.dim + j] = columns[j];
}

// dweight (dim) += column sums of partial (blocks, dim), in a fixed order.
__global__ void add_columns_kernel(
  const float* partial, int64_t blocks, int64_t dim, float* dweight) {
  __shared__ float part[32][33];
  const int64_t column = blockIdx.x * int64_t{32} + threadIdx.x;
  float sum = 0;
  if (column < dim) {
#pragma unroll 8
    for (int64_t b = threadIdx.y; b < blocks; b += 32) sum += partial[b * dim + column];
  }
  part[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= dim) return;
  sum = 0;
  for (int y = 0; y < 32; ++y) sum += part[y][threadIdx.x];
  dweight[column] += sum;
}

// f(Spread{}, threads of a block) with the smallest spread that holds a row.
template <int N, class F> void with_spread(int64_t dim, F&& f) {
  const auto whole_block = [&](auto spread) {
    f(spread, num_blocks(dim, kWarp * N * spread.PER) * kWarp);
  };
  if constexpr (N == 1) {
    if (dim <= 32 * 8) return f(Spread<1, 32, 8>{}, kGroupThreads);
    if (dim <= 1024 * 8) return whole_block(Spread<1, 0, 8, 1024>{});
    check(cudaErrorInvalidValue, "rms_norm of rows above 8192 elements: 16-byte aligned rows only");
  } else {
    if (dim <= 16 * N) return f(Spread<N, 16, 1>{}, kGroupThreads);
    if (dim <= 32 * 4 * N) return f(Spread<N, 32, 4>{}, kGroupThreads);
    if (dim <= 512 * 4 * N) return whole_block(Spread<N, 0, 4, 512>{});
    check(cudaErrorInvalidValue, "rms_norm of rows above 32 kB");
  }
}
}

void rms_norm_forward(
  Data x, const NormRows& rows, Data weight, float plus, double eps, Data y, float* rstd) {
  if (rows.count == 0) return;
  const auto strides = {rows.dim, rows.outer_stride, rows.inner_stride};
  with_vectors(x.bf16, {x, weight, y}, strides, [&]<class T, int N>() {
    with_spread<N>(rows.dim, [&](auto spread, unsigned threads) {
      using S = decltype(spread);
      const unsigned at_a_time = S::LANES == 0 ? 1 : threads / std::max(S::LANES, 1);
      forward_kernel<T, S><<<num_blocks(rows.count, at_a_time), threads, 0, current_stream()>>>(
        x, rows, weight, plus, float(eps), y, rstd);
    });
  });
}

int64_t rms_norm_blocks(const NormRows& rows) {
  // Of no device: one order of summation on all. As many blocks as an H200 runs at once (eight or
  // ten a multiprocessor); at least 16 rows a block.
  const int64_t by_rows = (rows.count + 15) / 16, most = rows.dim <= 128 ? 1320 : 1056;
  return by_rows < most ? by_rows : most;
}

void rms_norm_backward(Data x, const NormRows& rows, Data weight, float plus, const float* rstd,
  Data dy, Data dx, float* partial, float* dweight) {
  if (rows.count == 0) return;
  const auto blocks = unsigned(rms_norm_blocks(rows));
  const auto strides = {rows.dim, rows.outer_stride, rows.inner_stride};
  with_vectors(x.bf16, {x, weight, dy, dx}, strides, [&]<class T, int N>() {
    with_spread<N>(rows.dim, [&](auto spread, unsigned threads) {
      const auto kernel = backward_kernel<T, decltype(spread)>;
      const size_t shared = size_t(rows.dim) * sizeof(float);
      if (shared > 48 * 1024)
        check(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)),
          "rms_norm backward");
      kernel<<<blocks, threads, shared, current_stream()>>>(
        x, rows, weight, plus, rstd, dy, dx, partial);
    });
  });
  if (dweight == nullptr) return;
  add_columns_kernel<<<num_blocks(rows.dim, 32), dim3(32, 32), 0, current_stream()>>>(
    partial, blocks, rows.dim, dweight);
  launch_check("rms_norm dweight");
}
}
