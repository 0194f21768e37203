// Products of rows with their expert's matrix on Hopper: y[e] = x[e] w[e] (+ bias[e]), BF16 with
// sums in FP32.
//
// A persistent block computes tiles of kTileRows x kTileColumns of y. One thread copies 64 of the
// inner dimension of x and w at a time into a ring of stages (TMA); two warpgroups multiply
// (wgmma), each half of the rows, and hand their results in boxes to the copy engine, while the
// stages of the next tile fill. Where an expert's rows end inside of a tile, threads store what is
// its own.
#include "operators/hopper.cuh"

namespace pith::cuda {
namespace {

constexpr int kTileRows = 128, kTileColumns = 256, kDepth = 64, kStages = 3;
constexpr int kLeftBytes = kTileRows * kRowBytes,
              kStageBytes = kLeftBytes + kTileColumns * kRowBytes;
constexpr int kBoxRows = 64, kBoxes = kTileColumns / kBoxColumns;  // of a warpgroup's results

struct Shared {
  uint8_t stages[kStages][kStageBytes];              // of x, then of w
  uint8_t results[2][kBoxes][kBoxRows * kRowBytes];  // of both warpgroups
  Ring<kStages> ring;
};

struct Problem {
  const int32_t* offsets;  // (experts): where each expert's rows end
  const bf16* bias;        // (experts, out) or null
  bf16* y;                 // (rows, out)
  int experts, in, out;
};

#if PITH_HOPPER
struct Tile {
  int expert, row, rows, column;
};

// Calls f(tile) for this block's share; tiles that follow each other share their part of w.
template <class F> __device__ void for_each_tile(const Problem& p, F&& f) {
  const int across = (p.out + kTileColumns - 1) / kTileColumns;
  int next = static_cast<int>(blockIdx.x), first = 0, begin = 0;
  for (int expert = 0; expert < p.experts; ++expert) {
    const int end = p.offsets[expert], down = (end - begin + kTileRows - 1) / kTileRows;
    for (; next < first + down * across; next += static_cast<int>(gridDim.x)) {
      const int place = next - first, row = begin + place % down * kTileRows;
      f(Tile{expert, row, min(kTileRows, end - row), place / down * kTileColumns});
    }
    first += down * across;
    begin = end;
  }
}

template <bool W_BY_ROWS> __device__ void copy_tiles(
    const CUtensorMap& x, const CUtensorMap& w, const Problem& p, Shared& shared) {
  RingPlace<kStages> at{1};
  for_each_tile(p, [&](const Tile& tile) {
    for (int k = 0; k < p.in; k += kDepth, at.next()) {
      wait(&shared.ring.empty[at.stage], at.parity);
      uint64_t* full = &shared.ring.full[at.stage];
      expect(full, kStageBytes);
      uint8_t* box = shared.stages[at.stage];
      copy_box(x, box, k, tile.row, 0, full);
      box += kLeftBytes;
      if (!W_BY_ROWS) copy_box(w, box, k, tile.column, tile.expert, full);
      for (int i = 0; W_BY_ROWS && i < kBoxes; ++i)
        copy_box(
            w, box + i * kDepth * kRowBytes, tile.column + i * kBoxColumns, k, tile.expert, full);
    }
  });
}

// A warpgroup's results to y, from its row `row` on, `rows` of them this expert's.
__device__ void put_results(const float (&sum)[128], const CUtensorMap& y, const Problem& p,
    const Tile& tile, int row, int rows, uint8_t (&boxes)[kBoxes][kBoxRows * kRowBytes],
    int barrier, int thread) {
  if (thread == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());  // of the last tile's
  sync_warpgroup(barrier);
#pragma unroll
  for (int group = 0; group < kTileColumns / 8; ++group) {
    const int column = tile.column + 8 * group + thread % 4 * 2;
    float2 bias{0, 0};
    if (p.bias && column < p.out)
      bias = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(
          p.bias + static_cast<int64_t>(tile.expert) * p.out + column));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = thread / 32 * 16 + thread % 32 / 4 + half * 8, at = 4 * group + 2 * half;
      uint8_t* unit = boxes[group / 8] + r * kRowBytes + (group % 8 ^ r % 8) * 16;
      *reinterpret_cast<__nv_bfloat162*>(unit + thread % 4 * 4) =
          __floats2bfloat162_rn(sum[at] + bias.x, sum[at + 1] + bias.y);
    }
  }
  ptx::fence_proxy_async(ptx::space_shared);
  sync_warpgroup(barrier);
  if (rows >= kBoxRows) {
    if (thread > 0) return;
    for (int i = 0; i < kBoxes; ++i) {
      const int place[] = {tile.column + i * kBoxColumns, row, 0};
      ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &y, place, boxes[i]);
    }
    return ptx::cp_async_bulk_commit_group();
  }
  for (int i = thread; i < rows * kBoxes * 8; i += 128) {  // in units of 16 bytes
    const int r = i / (kBoxes * 8), unit = i % 8, box = i / 8 % kBoxes;
    const int column = tile.column + box * kBoxColumns + unit * 8;
    if (column < p.out)
      *reinterpret_cast<uint4*>(p.y + static_cast<int64_t>(row + r) * p.out + column) =
          *reinterpret_cast<const uint4*>(boxes[box] + r * kRowBytes + (unit ^ r % 8) * 16);
  }
}
#endif

template <bool W_BY_ROWS>
__global__ __launch_bounds__(kThreads, 1) void product_kernel(const __grid_constant__ CUtensorMap x,
    const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap y, const Problem p) {
#if PITH_HOPPER
  auto& shared = shared_memory<Shared>();
  init(shared.ring);
  const int half = static_cast<int>(threadIdx.x) / 128 - 1;
  if (half < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) copy_tiles<W_BY_ROWS>(x, w, p, shared);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int thread = static_cast<int>(threadIdx.x) % 128, steps = (p.in + kDepth - 1) / kDepth;
  RingPlace<kStages> at{0};
  for_each_tile(p, [&](const Tile& tile) {
    float sum[128];
    multiply_stages<false, W_BY_ROWS>(sum, shared.stages, shared.ring, at, steps,
        half * kBoxRows * kRowBytes, kLeftBytes, kDepth * kRowBytes, thread == 0,
        [](int, uint8_t*) {});
    put_results(sum, y, p, tile, tile.row + half * kBoxRows, tile.rows - half * kBoxRows,
        shared.results[half], 1 + half, thread);
  });
  if (thread == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
#endif
}

}  // namespace

bool grouped_product(const void* x, const void* w, const void* bias, const int32_t* offsets,
    void* y, int64_t rows, int64_t experts, int64_t in, int64_t out, bool w_by_rows) {
  constexpr size_t kBytes = sizeof(Shared) + 1024;
  static const int processors = std::min(hopper_processors(product_kernel<false>, kBytes),
      hopper_processors(product_kernel<true>, kBytes));
  const bool fits = out % 8 == 0 && in % 8 == 0 && aligned<uint8_t, 16>({x, w, bias, y}, {});
  if (processors == 0 || !fits) return false;
  if (rows == 0) return true;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMap right = w_by_rows
      ? tensor_map(kType, w, {out, in, experts}, {kBoxColumns, kDepth})
      : tensor_map(kType, w, {in, out, experts}, {kDepth, kTileColumns});
  const auto kernel = w_by_rows ? product_kernel<true> : product_kernel<false>;
  kernel<<<static_cast<unsigned>(processors), kThreads, kBytes, current_stream()>>>(
      tensor_map(kType, x, {in, rows}, {kDepth, kTileRows}), right,
      tensor_map(kType, y, {out, rows}, {kBoxColumns, kBoxRows}),
      Problem{offsets, static_cast<const bf16*>(bias), static_cast<bf16*>(y),
          static_cast<int>(experts), static_cast<int>(in), static_cast<int>(out)});
  launch_check("grouped_product");
  return true;
}

}  // namespace pith::cuda
