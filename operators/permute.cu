// Grouping by expert: counting sort of the top-k ids, row gather, gather-and-sum and its backward.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

// --- The plan: a stable counting sort. A warp owns a chunk of consecutive entries. ---

constexpr int64_t kMaxChunks = 512;
constexpr int kWarpsPerBlock = 4;

// Entries of a chunk: a multiple of 32, so many that the scan has at most kMaxChunks to run over.
int64_t chunk_entries(int64_t entries) {
  const int64_t least = (entries + kMaxChunks - 1) / kMaxChunks;
  return ((least < 256 ? 256 : least) + kWarp - 1) / kWarp * kWarp;
}

// count (chunks, E): entries of each expert in each chunk. Integer atomics: any order, one result.
__global__ void count_kernel(const int64_t* __restrict__ topk_idx, int64_t entries, int num_experts,
    int64_t chunk, int32_t* __restrict__ count, int32_t* __restrict__ invalid) {
  extern __shared__ int32_t shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int32_t* mine = shared + warp * num_experts;
  for (int e = lane; e < num_experts; e += kWarp) mine[e] = 0;
  __syncwarp();
  const int64_t id = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp;
  const int64_t begin = id * chunk, end = min(begin + chunk, entries);
  for (int64_t i = begin + lane; i < end; i += kWarp) {
    const int64_t expert = topk_idx[i];
    if (expert >= 0 && expert < num_experts)
      atomicAdd(&mine[expert], 1);
    else if (expert != -1)
      atomicAdd(invalid, 1);
  }
  __syncwarp();
  if (begin >= entries) return;
  for (int e = lane; e < num_experts; e += kWarp) count[id * num_experts + e] = mine[e];
}

// One block; an expert's chunks are cut into equal parts, a thread each. count becomes the first
// slot of (chunk, expert).
__global__ void scan_kernel(
    int32_t* __restrict__ count, int64_t chunks, int num_experts, int32_t* __restrict__ offsets) {
  __shared__ int32_t total[1024];
  const int i = static_cast<int>(threadIdx.x);
  const int parts = static_cast<int>(blockDim.x) / num_experts;
  const int e = i % num_experts, part = i / num_experts;  // neighbours read neighbours
  const int64_t share = (chunks + parts - 1) / parts, begin = part * share;
  const int64_t end = part < parts ? min(begin + share, chunks) : begin;
  int32_t sum = 0;
#pragma unroll 8
  for (int64_t c = begin; c < end; ++c) sum += count[c * num_experts + e];
  total[i] = 0;
  __syncthreads();
  const int place = e * parts + part;
  if (part < parts) total[place] = sum;
  __syncthreads();
  for (int step = 1; step < static_cast<int>(blockDim.x); step *= 2) {  // inclusive scan
    const int32_t left = i >= step ? total[i - step] : 0;
    __syncthreads();
    total[i] += left;
    __syncthreads();
  }
  if (part >= parts) return;
  if (part == parts - 1) offsets[e] = total[place];
  int32_t slot = total[place] - sum;
#pragma unroll 8
  for (int64_t c = begin; c < end; ++c) {
    const int32_t here = count[c * num_experts + e];
    count[c * num_experts + e] = slot;
    slot += here;
  }
}

// The warp walks its chunk in order; lanes with the same expert take slots in lane order.
__global__ void place_kernel(const int64_t* __restrict__ topk_idx, int64_t entries, int64_t k,
    int num_experts, int64_t chunk, const int32_t* __restrict__ first_slot,
    int32_t* __restrict__ row_of_slot, int32_t* __restrict__ slot_of) {
  extern __shared__ int32_t shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t id = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp;
  const int64_t begin = id * chunk, end = min(begin + chunk, entries);
  if (begin >= entries) return;
  int32_t* next = shared + warp * num_experts;
  for (int e = lane; e < num_experts; e += kWarp) next[e] = first_slot[id * num_experts + e];
  __syncwarp();
  for (int64_t base = begin; base < end; base += kWarp) {
    const int64_t i = base + lane;
    int64_t expert = i < end ? topk_idx[i] : -1;
    if (expert < 0 || expert >= num_experts) expert = -1;
    const unsigned same = __match_any_sync(0xffffffffu, static_cast<int>(expert));
    const int rank = __popc(same & ((1u << lane) - 1));
    int32_t slot = -1;
    if (expert >= 0) slot = next[expert] + rank;
    __syncwarp();
    if (expert >= 0 && rank == 0) next[expert] += __popc(same);
    __syncwarp();
    if (i < end) {
      slot_of[i] = slot;
      if (slot >= 0) row_of_slot[slot] = static_cast<int32_t>(i / k);
    }
  }
}

// --- Moving rows ---

// Each thread copies one unit of kRowsInFlight slots; a block's rows are neighbours.
constexpr int kRowsInFlight = 4;

template <class T>
__global__ void gather_kernel(T* __restrict__ out, const T* __restrict__ rows,
    const int32_t* __restrict__ row_of_slot, int64_t slots, int64_t units) {
  const int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x;
  const int64_t first = blockIdx.x * int64_t{blockDim.y} * kRowsInFlight + threadIdx.y;
  if (unit >= units) return;
  T value[kRowsInFlight];
  for (int u = 0; u < kRowsInFlight; ++u) {
    const int64_t s = first + u * blockDim.y;
    if (s < slots) value[u] = rows[row_of_slot[s] * units + unit];
  }
  for (int u = 0; u < kRowsInFlight; ++u) {
    const int64_t s = first + u * blockDim.y;
    if (s < slots) out[s * units + unit] = value[u];
  }
}

// A thread owns N columns of one row and sums the row's slots, four loads at a time.
template <class T, int N>
__global__ void gather_sum_kernel(T* __restrict__ out, const T* __restrict__ slots,
    const float* __restrict__ weight, const int32_t* __restrict__ slot_of, int64_t rows, int64_t k,
    int64_t hidden) {
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

// A warp owns one entry (row, j): scales dout's row into the slot and takes the dot product. The
// warps of a row's entries run side by side: dout's row is read from memory once.
template <class T, int N>
__global__ void unpermute_backward_kernel(T* __restrict__ dslots, float* __restrict__ dweight,
    const T* __restrict__ dout, const T* __restrict__ slots, const float* __restrict__ weight,
    const int32_t* __restrict__ slot_of, int64_t entries, int64_t k, int64_t hidden) {
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

}  // namespace

int64_t expert_plan_workspace(int64_t entries, int64_t num_experts) {
  const int64_t chunks = num_blocks(entries, chunk_entries(entries));
  return (chunks * num_experts + 1) * static_cast<int64_t>(sizeof(int32_t));
}

void expert_plan(const int64_t* topk_idx, int64_t entries, int64_t k, int64_t num_experts,
    int32_t* row_of_slot, int32_t* slot_of, int32_t* offsets, void* workspace,
    cudaStream_t stream) {
  const int64_t chunk = chunk_entries(entries), chunks = num_blocks(entries, chunk);
  const unsigned blocks = num_blocks(chunks, kWarpsPerBlock);
  const auto experts = static_cast<int>(num_experts);
  const size_t shared = sizeof(int32_t) * static_cast<size_t>(kWarpsPerBlock * num_experts);
  auto* count = static_cast<int32_t*>(workspace);
  check(cudaMemsetAsync(offsets + num_experts, 0, sizeof(int32_t), stream), "expert_plan");
  if (blocks > 0) {
    count_kernel<<<blocks, kWarpsPerBlock * kWarp, shared, stream>>>(
        topk_idx, entries, experts, chunk, count, offsets + num_experts);
    launch_check("expert_plan: count");
  }
  scan_kernel<<<1, 1024, 0, stream>>>(count, chunks, experts, offsets);
  launch_check("expert_plan: scan");
  if (blocks == 0) return;
  place_kernel<<<blocks, kWarpsPerBlock * kWarp, shared, stream>>>(
      topk_idx, entries, k, experts, chunk, count, row_of_slot, slot_of);
  launch_check("expert_plan: place");
}

void gather_rows(void* out, const void* rows, const int32_t* row_of_slot, int64_t slots,
    int64_t row_bytes, cudaStream_t stream) {
  if (slots == 0 || row_bytes == 0) return;
  const auto run = [&]<class T>() {
    const int64_t units = row_bytes / static_cast<int64_t>(sizeof(T));
    const RowGrid shape = row_grid(num_blocks(slots, kRowsInFlight), units);
    gather_kernel<T><<<shape.grid, shape.block, 0, stream>>>(
        static_cast<T*>(out), static_cast<const T*>(rows), row_of_slot, slots, units);
  };
  const bool full = aligned<uint8_t, 16>({out, rows}, {row_bytes});
  full ? run.template operator()<uint4>() : run.template operator()<uint16_t>();
  launch_check("gather_rows");
}

void gather_sum(void* out, const void* slots, const float* weight, const int32_t* slot_of,
    int64_t rows, int64_t k, int64_t hidden, bool is_bf16, cudaStream_t stream) {
  if (rows * hidden == 0) return;
  with_vectors(is_bf16, {out, slots}, {hidden}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, hidden / N);
    gather_sum_kernel<T, N><<<shape.grid, shape.block, 0, stream>>>(
        static_cast<T*>(out), static_cast<const T*>(slots), weight, slot_of, rows, k, hidden);
  });
  launch_check("gather_sum");
}

void unpermute_backward(void* dslots, float* dweight, const void* dout, const void* slots,
    const float* weight, const int32_t* slot_of, int64_t rows, int64_t k, int64_t hidden,
    bool is_bf16, CUstream_st* stream) {
  if (rows == 0) return;
  constexpr int kWarps = 8;
  with_vectors(is_bf16, {dslots, dout, slots}, {hidden}, [&]<class T, int N>() {
    unpermute_backward_kernel<T, N><<<num_blocks(rows * k, kWarps), kWarps * kWarp, 0, stream>>>(
        static_cast<T*>(dslots), dweight, static_cast<const T*>(dout), static_cast<const T*>(slots),
        weight, slot_of, rows * k, k, hidden);
  });
  launch_check("unpermute_backward");
}

}  // namespace pith::cuda
