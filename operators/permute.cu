#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {
// A thread reads one unit of a row once and writes it to the row's slots.
template <class T> __global__ void scatter_kernel(T* __restrict__ out, const T* __restrict__ rows,
  const int32_t* __restrict__ slot_of, int64_t count, int64_t k, int64_t units) {
  const int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x;
  const int64_t r = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  if (unit >= units || r >= count) return;
  const T value = rows[r * units + unit];
  for (int64_t j = r * k; j < (r + 1) * k; ++j)
    if (slot_of[j] >= 0) out[slot_of[j] * units + unit] = value;
}

// A thread owns N columns of a row and sums its slots, four loads at a time.
template <class T, int N> __global__ void gather_sum_kernel(T* __restrict__ out,
  const T* __restrict__ slots, const float* __restrict__ weight,
  const int32_t* __restrict__ slot_of, int64_t rows, int64_t k, int64_t hidden) {
  const int64_t r = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int64_t h = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * N;
  if (r >= rows || h >= hidden) return;
  const int32_t* slot = slot_of + r * k;
  float sum[N] = {};
  for (int64_t j0 = 0; j0 < k; j0 += 4) {
    Vec<T, N> x[4];
    float factor[4];
    for (int u = 0; u < 4; ++u) {
      const int64_t source = j0 + u < k ? slot[j0 + u] : -1;
      factor[u] = 0;
      if (source >= 0) {
        factor[u] = weight ? weight[r * k + j0 + u] : 1.0f;
        x[u] = load<N>(slots + source * hidden + h);
      } else {
        x[u] = {};
      }
    }
    for (int u = 0; u < 4; ++u)
      for (int n = 0; n < N; ++n) sum[n] = fmaf(factor[u], to_float(x[u].v[n]), sum[n]);
  }
  Vec<T, N> result;
  for (int n = 0; n < N; ++n) result.v[n] = from_float<T>(sum[n]);
  store(out + r * hidden + h, result);
}

// A warp owns one entry (row, j): scales dout's row into the slot and takes the dot product. A
// row's warps run side by side: dout's row is read from memory once.
template <class T, int N> __global__ void unpermute_backward_kernel(T* __restrict__ dslots,
  float* __restrict__ dweight, const T* __restrict__ dout, const T* __restrict__ slots,
  const float* __restrict__ weight, const int32_t* __restrict__ slot_of, int64_t entries, int64_t k,
  int64_t hidden) {
  const int lane = threadIdx.x % kWarp;
  const int64_t entry = blockIdx.x * int64_t{blockDim.x / kWarp} + threadIdx.x / kWarp;
  if (entry >= entries) return;
  const int64_t slot = slot_of[entry];
  if (slot < 0) {
    if (lane == 0) dweight[entry] = 0;
    return;
  }
  const float factor = weight[entry];
  const T *d = dout + entry / k * hidden, *source = slots + slot * hidden;
  T* target = dslots + slot * hidden;
  float dot = 0;
#pragma unroll 4
  for (int64_t h = lane * N; h < hidden; h += kWarp * N) {
    const Vec<T, N> gradient = load<N>(d + h), x = load<N>(source + h);
    Vec<T, N> scaled;
    for (int n = 0; n < N; ++n) {
      dot = fmaf(to_float(gradient.v[n]), to_float(x.v[n]), dot);
      scaled.v[n] = from_float<T>(factor * to_float(gradient.v[n]));
    }
    store(target + h, scaled);
  }
  dot = lanes_sum<kWarp>(dot);
  if (lane == 0) dweight[entry] = dot;
}
}

void scatter_rows(void* out, const void* rows, const int32_t* slot_of, int64_t count, int64_t k,
  int64_t row_bytes) {
  if (count == 0 || row_bytes == 0) return;
  const auto run = [&]<class T>() {
    const int64_t units = row_bytes / int64_t(sizeof(T));
    const RowGrid shape = row_grid(count, units);
    scatter_kernel<T><<<shape.grid, shape.block, 0, current_stream()>>>(
      static_cast<T*>(out), static_cast<const T*>(rows), slot_of, count, k, units);
  };
  const bool full = aligned<uint8_t, 16>({out, rows}, {row_bytes});
  full ? run.template operator()<uint4>() : run.template operator()<uint16_t>();
  launch_check("scatter_rows");
}

void gather_sum(Data out, Data slots, const float* weight, const int32_t* slot_of, int64_t rows,
  int64_t k, int64_t hidden) {
  if (rows * hidden == 0) return;
  with_vectors(out.bf16, {out, slots}, {hidden}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, hidden / N);
    gather_sum_kernel<T, N><<<shape.grid, shape.block, 0, current_stream()>>>(
      out, slots, weight, slot_of, rows, k, hidden);
  });
}

void unpermute_backward(Data dslots, float* dweight, Data dout, Data slots, const float* weight,
  const int32_t* slot_of, int64_t rows, int64_t k, int64_t hidden) {
  if (rows == 0) return;
  constexpr int kWarps = 8;
  with_vectors(dslots.bf16, {dslots, dout, slots}, {hidden}, [&]<class T, int N>() {
    const unsigned blocks = num_blocks(rows * k, kWarps);
    unpermute_backward_kernel<T, N><<<blocks, kWarps * kWarp, 0, current_stream()>>>(
      dslots, dweight, dout, slots, weight, slot_of, rows * k, k, hidden);
  });
}
}
