// Weight gradients of grouped linear maps on Hopper: gradient[e] += dy[e]^T x[e] for every expert
// e, dy[e] and x[e] being its rows, with BF16 operands and sums in FP32.
//
// A persistent block computes tiles of kTileOut x kTileIn of an expert's gradient. One thread
// copies kTileRows rows of dy and x at a time into a ring of stages (TMA); two warpgroups multiply
// (wgmma), each half of the tile, and hand their sums in boxes to the copy engine, which adds them
// in the L2 cache. Each element is added to once: the same bits always.
//
// At 512 rows an expert the products take less than half of the time: the gradient is read and
// written once, 8 bytes for 512 multiply-adds. Measured alternatives: docs/performance.md.
#include "operators/hopper.cuh"

namespace pith::cuda {
namespace {

constexpr int kTileOut = 128, kTileIn = 256, kTileRows = 64, kStages = 4;
constexpr int kBoxBytes = kTileRows * kRowBytes;
constexpr int kOutBoxes = kTileOut / kBoxColumns, kInBoxes = kTileIn / kBoxColumns;
constexpr int kStageBytes = (kOutBoxes + kInBoxes) * kBoxBytes;
// Boxes of sums: 64 rows of 128 bytes; a warpgroup keeps so many until they are copied.
constexpr int kSumColumns = 32, kWaiting = 2;

struct Shared {
  uint8_t stages[kStages][kStageBytes];      // boxes of dy, then of x
  float sums[2][kWaiting][64][kSumColumns];  // of both warpgroups
  Ring<kStages> ring;
};

struct Problem {
  const int32_t* offsets;  // (experts): where each expert's rows end
  int experts, out, in;
};

#if PITH_HOPPER
struct Tile {
  int expert, out, in;  // first row and column of the expert's gradient
  int begin, rows;      // of dy and x
};

// Calls f(tile) for this block's share of the tiles whose expert has rows.
template <class F> __device__ void for_each_tile(const Problem& p, F&& f) {
  const int across = (p.in + kTileIn - 1) / kTileIn;
  const int per_expert = across * ((p.out + kTileOut - 1) / kTileOut);
  for (int i = static_cast<int>(blockIdx.x); i < p.experts * per_expert; i += gridDim.x) {
    const int expert = i / per_expert, place = i % per_expert;
    const int begin = expert == 0 ? 0 : p.offsets[expert - 1];
    const int rows = p.offsets[expert] - begin;
    if (rows > 0) f(Tile{expert, place / across * kTileOut, place % across * kTileIn, begin, rows});
  }
}

__device__ void copy_tiles(
    const CUtensorMap& dy, const CUtensorMap& x, const Problem& p, Shared& shared) {
  RingPlace<kStages> at{1};
  for_each_tile(p, [&](const Tile& tile) {
    for (int row = 0; row < tile.rows; row += kTileRows, at.next()) {
      wait(&shared.ring.empty[at.stage], at.parity);
      uint64_t* full = &shared.ring.full[at.stage];
      expect(full, kStageBytes);
      uint8_t* box = shared.stages[at.stage];
      for (int i = 0; i < kOutBoxes; ++i, box += kBoxBytes)
        copy_box(dy, box, tile.out + i * kBoxColumns, tile.begin + row, 0, full);
      for (int i = 0; i < kInBoxes; ++i, box += kBoxBytes)
        copy_box(x, box, tile.in + i * kBoxColumns, tile.begin + row, 0, full);
    }
  });
}

// Zeroes the rows of a stage from `first` on: they belong to the next expert. `thread` of 256.
__device__ void clear_rows(uint8_t* stage, int first, int thread) {
  const int vectors = (kTileRows - first) * 8;  // of 16 bytes in each box
  for (int i = thread; i < vectors * (kOutBoxes + kInBoxes); i += 256)
    *reinterpret_cast<uint4*>(
        stage + i / vectors * kBoxBytes + first * kRowBytes + i % vectors * 16) = uint4{0, 0, 0, 0};
  ptx::fence_proxy_async(ptx::space_shared);
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

// Adds a warpgroup's sums to the gradient from row `row` of the expert on, box by box.
__device__ void add_sums(const float (&sum)[128], const CUtensorMap& gradient, const Tile& tile,
    int row, float (&boxes)[kWaiting][64][kSumColumns], int barrier, int thread) {
#pragma unroll
  for (int box = 0; box < kTileIn / kSumColumns; ++box) {
    auto& staged = boxes[box % kWaiting];
    if (thread == 0)  // the copy before the last has read this box
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kWaiting - 1>());
    sync_warpgroup(barrier);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
      const int column = i / 2 * 8 + thread % 4 * 2, at = 2 * (8 * box + i);
      const int swizzled = (column / 4 ^ r % 8) * 4 + column % 4;  // in units of 16 bytes
      *reinterpret_cast<float2*>(&staged[r][swizzled]) = float2{sum[at], sum[at + 1]};
    }
    ptx::fence_proxy_async(ptx::space_shared);
    sync_warpgroup(barrier);
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
  auto& shared = shared_memory<Shared>();
  init(shared.ring);
  const int half = static_cast<int>(threadIdx.x) / 128 - 1;
  if (half < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) copy_tiles(dy, x, p, shared);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int thread = static_cast<int>(threadIdx.x) % 128;
  RingPlace<kStages> at{0};
  for_each_tile(p, [&](const Tile& tile) {
    float sum[128];
    multiply_stages<true, true>(sum, shared.stages, shared.ring, at,
        (tile.rows + kTileRows - 1) / kTileRows, half * kBoxBytes, kOutBoxes * kBoxBytes, kBoxBytes,
        thread == 0, [&](int step, uint8_t* stage) {
          const int left = tile.rows - step * kTileRows;
          if (left < kTileRows) clear_rows(stage, left, half * 128 + thread);
        });
    add_sums(sum, gradient, tile, tile.out + half * 64, shared.sums[half], 2 + half, thread);
  });
  if (thread == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
#endif
}

}  // namespace

bool grouped_weight_gradient(const void* dy, const void* x, const int32_t* offsets, float* gradient,
    int64_t rows, int64_t experts, int64_t out, int64_t in) {
  constexpr size_t kBytes = sizeof(Shared) + 1024;
  static const int processors = hopper_processors(weight_gradient_kernel, kBytes);
  const bool fits = out % 8 == 0 && in % 8 == 0 && aligned<uint8_t, 16>({dy, x, gradient}, {});
  if (processors == 0 || !fits) return false;
  if (rows == 0) return true;
  const auto rows_map = [&](const void* data, int64_t columns) {
    return tensor_map(
        CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, {columns, rows}, {kBoxColumns, kTileRows});
  };
  weight_gradient_kernel<<<static_cast<unsigned>(processors), kThreads, kBytes, current_stream()>>>(
      rows_map(dy, out), rows_map(x, in),
      tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, gradient, {in, out, experts}, {kSumColumns, 64}),
      Problem{offsets, static_cast<int>(experts), static_cast<int>(out), static_cast<int>(in)});
  launch_check("grouped_weight_gradient");
  return true;
}

}  // namespace pith::cuda
