// Weight gradients on Hopper: gradient[e] += dy[e]^T x[e] over expert e's rows, BF16 operands, sums
// in FP32. A persistent block computes tiles of kTileM x kTileN of an expert's gradient and hands
// them in boxes to the copy engine, which adds them in the L2 cache. Each element is added to once:
// the same bits always.
// Bound by the gradient's bytes; alternatives: docs/performance.md.
#include "operators/hopper.cuh"

namespace pith::cuda {
namespace {
constexpr int kStages = 4;
// 64 rows of 128 bytes; a warpgroup keeps so many until they are copied.
constexpr int kSumColumns = 32, kWaiting = 2;

struct Shared {
  Ring<kStages> ring; // dy, then x
  alignas(1024) float sums[2][kWaiting][64][kSumColumns]; // of both warpgroups
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;

struct Problem {
  const int32_t* offsets; // (experts): the ends of their rows
  int experts, out, in;
};

struct Tile {
  int expert, out, in; // first row and column of the expert's gradient
  int begin, rows; // of dy and x
};

#if PITH_HOPPER
// This block's share of the tiles whose expert has rows.
template <class F> __device__ void for_each_tile(const Problem& p, F&& f) {
  const int across = (p.in + kTileN - 1) / kTileN;
  const int per_expert = across * ((p.out + kTileM - 1) / kTileM);
  for (int i = int(blockIdx.x); i < p.experts * per_expert; i += gridDim.x) {
    const int expert = i / per_expert, place = i % per_expert;
    const int begin = expert == 0 ? 0 : p.offsets[expert - 1];
    const int rows = p.offsets[expert] - begin;
    if (rows > 0) f(Tile{expert, place / across * kTileM, place % across * kTileN, begin, rows});
  }
}

__device__ inline void fill_stages(
  const CUtensorMap& dy, const CUtensorMap& x, const Problem& p, Place<kStages> place) {
  for_each_tile(p, [&](const Tile& tile) {
    for (int row = tile.begin; row < tile.begin + tile.rows; row += kStep, place.next()) {
      wait(place.empty(), place.parity);
      expect(place.full(), kStageBytes);
      uint8_t* box = place.stage();
      for (int i = 0; i < kTileM; i += kBoxColumns, box += kStepBox)
        copy_box(dy, box, {tile.out + i, row}, place.full());
      for (int i = 0; i < kTileN; i += kBoxColumns, box += kStepBox)
        copy_box(x, box, {tile.in + i, row}, place.full());
    }
  });
}

// Zeroes a stage's rows from `first` on, the next expert's. `thread` of 256.
__device__ inline void clear_rows(uint8_t* stage, int first, int thread) {
  const int vectors = (kStep - first) * 8; // of 16 bytes in each box
  for (int i = thread; i < vectors * (kStageBytes / kStepBox); i += 256)
    *reinterpret_cast<uint4*>(stage + i / vectors * kStepBox + first * kBoxRow + i % vectors * 16) =
      uint4{0, 0, 0, 0};
  ptx::fence_proxy_async(ptx::space_shared);
  group_sync(1, 256);
}

// Adds sums to the gradient from the expert's `row` on, box by box.
__device__ inline void add_sums(const float (&sum)[128], const CUtensorMap& gradient,
  const Tile& tile, int row, float (&boxes)[kWaiting][64][kSumColumns], int group, int thread) {
#pragma unroll
  for (int box = 0; box < kTileN / kSumColumns; ++box) {
    auto& staged = boxes[box % kWaiting];
    if (thread == 0) // the copy before the last has read this box
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kWaiting - 1>());
    group_sync(group);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
      const int column = i / 2 * 8 + thread % 4 * 2, at = 2 * (8 * box + i);
      const int swizzled = (column / 4 ^ r % 8) * 4 + column % 4; // in units of 16 bytes
      *reinterpret_cast<float2*>(&staged[r][swizzled]) = float2{sum[at], sum[at + 1]};
    }
    ptx::fence_proxy_async(ptx::space_shared);
    group_sync(group);
    if (thread > 0) continue;
    const int place[] = {tile.in + box * kSumColumns, row, tile.expert};
    ptx::cp_reduce_async_bulk_tensor(
      ptx::space_global, ptx::space_shared, ptx::op_add, &gradient, place, &staged);
    ptx::cp_async_bulk_commit_group();
  }
}
#endif

__global__ __launch_bounds__(kThreads, 1) void weight_gradient_kernel(
  const __grid_constant__ CUtensorMap dy, const __grid_constant__ CUtensorMap x,
  const __grid_constant__ CUtensorMap gradient, const Problem p) {
#if PITH_HOPPER
  extern __shared__ uint8_t memory[];
  auto& shared = shared_at_1024<Shared>(memory);
  if (threadIdx.x == 0) init_ring(shared.ring, 1);
  __syncthreads();
  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0), thread = threadIdx.x % 128;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == 0) fill_stages(dy, x, p, {shared.ring, 1});
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Place<kStages> place{shared.ring, 0};
    const int half = group - 1;
    for_each_tile(p, [&](const Tile& tile) {
      float sum[128];
      multiply_stages<true, true>(
        sum, place, (tile.rows + kStep - 1) / kStep, half, [&](uint8_t* stage, int step) {
        const int rows = tile.rows - step * kStep;
        if (rows < kStep) clear_rows(stage, rows, half * 128 + thread);
      }, [](int) {});
      add_sums(sum, gradient, tile, tile.out + half * 64, shared.sums[half], 2 + half, thread);
    });
    if (thread == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
  }
#endif
}
}

bool grouped_weight_gradient(const void* dy, const void* x, const int32_t* offsets, float* gradient,
  int64_t rows, int64_t experts, int64_t out, int64_t in) {
  static const unsigned blocks = persistent_blocks(weight_gradient_kernel, kSharedBytes);
  const bool fits = out % 8 == 0 && in % 8 == 0 && aligned<uint8_t, 16>({dy, x, gradient}, {});
  if (blocks == 0 || !fits) return false;
  if (rows == 0) return true;
  const auto rows_map = [&](const void* data, int64_t columns) {
    return tensor_map(kMapBf16, data, {columns, rows}, {kBoxColumns, kStep});
  };
  weight_gradient_kernel<<<blocks, kThreads, kSharedBytes, current_stream()>>>(rows_map(dy, out),
    rows_map(x, in),
    tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, gradient, {in, out, experts}, {kSumColumns, 64, 1}),
    Problem{offsets, int(experts), int(out), int(in)});
  launch_check("grouped_weight_gradient");
  return true;
}
}
