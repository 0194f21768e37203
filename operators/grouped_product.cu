// y = x W[e] + bias[e] over each expert's rows, on Hopper: BF16 operands, sums in FP32, rounded
// once. A persistent block computes tiles of kTileM rows x kTileN columns. Weights and rows in
// order come by TMA, listed rows by cp.async; the copy engine writes results during the next tile.
#include "operators/hopper.cuh"

namespace pith::cuda {
namespace {
struct Problem {
  const bf16* x; // (any, in)
  const int32_t* listed; // (rows) of x, or null: x is (rows, in)
  const int32_t* offsets; // (experts): the ends of their rows
  const bf16* bias; // (experts, out) or null
  bf16* y; // (rows, out)
  int rows, experts, in, out;
};

constexpr int kStages = 3;
// Listed rows pass through L1: fewer results, more L1.
template <bool LISTED> constexpr int kBoxes = kTileN / kBoxColumns / (LISTED ? 2 : 1);
using Box = uint8_t[64 * kBoxRow];
template <bool LISTED> struct Shared {
  Ring<kStages> ring;
  alignas(1024) Box results[2][kBoxes<LISTED>]; // of each warpgroup
};

struct Tile {
  int expert, row, end, column; // end: of the expert's rows
};

#if PITH_HOPPER
// This block's tiles; neighbours share rows.
struct Walk {
  const Problem& p;
  int i = int(blockIdx.x), expert = 0, before = 0; // tiles of earlier experts
  int begin = 0, end = p.offsets[0];

  __device__ bool next(Tile& tile) {
    const int across = (p.out + kTileN - 1) / kTileN;
    for (int count; i >= before + (count = (end - begin + kTileM - 1) / kTileM * across);) {
      before += count;
      if (++expert == p.experts) return false;
      begin = end, end = p.offsets[expert];
    }
    const int place = i - before;
    tile = {expert, begin + place / across * kTileM, end, place % across * kTileN};
    i += int(gridDim.x);
    return true;
  }
};

// Thread 0 copies a stage's weights: (experts, out, in), or, ACROSS, (experts, in, out).
template <bool ACROSS> __device__ void copy_weights(
    const CUtensorMap& weights, const Tile& tile, int k, uint8_t* box, uint64_t* full) {
  if constexpr (ACROSS)
    for (int i = 0; i < kTileN / kBoxColumns; ++i, box += kStepBox)
      copy_box(weights, box, {tile.column + i * kBoxColumns, k, tile.expert}, full);
  else copy_box(weights, box, {k, tile.column, tile.expert}, full);
}

template <bool ACROSS> __device__ void fill_in_order(
    const CUtensorMap& x, const CUtensorMap& weights, const Problem& p, Place<kStages> place) {
  Walk walk{p};
  for (Tile tile; walk.next(tile);)
    for (int k = 0; k < p.in; k += kStep, place.next()) {
      wait(place.empty(), place.parity);
      expect(place.full(), kStageBytes);
      copy_box(x, place.stage(), {k, tile.row}, place.full());
      copy_weights<ACROSS>(weights, tile, k, place.stage() + kBytesA, place.full());
    }
}

template <bool ACROSS> __device__ void fill_listed(
    const CUtensorMap& weights, const Problem& p, Place<kStages> place, int thread) {
  constexpr int kMine = kTileM / 16; // rows first + 16 i
  const int unit = thread % 8, first = thread / 8;
  const int target = first * kBoxRow + (unit ^ first % 8) * 16;
  Walk walk{p};
  Tile tile;
  int coming[kMine];
  const auto look_up = [&] {
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      coming[i] = p.listed[min(tile.row + first + 16 * i, p.rows - 1)];
  };
  bool more = walk.next(tile);
  if (more) look_up();
  while (more) {
    const Tile now = tile;
    int row[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) row[i] = coming[i];
    more = walk.next(tile);
    if (more) look_up(); // they arrive while this tile is copied
    for (int k = 0; k < p.in; k += kStep, place.next()) {
      wait(place.empty(), place.parity);
      if (thread == 0) {
        expect(place.full(), kStageBytes - kBytesA);
        copy_weights<ACROSS>(weights, now, k, place.stage() + kBytesA, place.full());
      }
      const bool exists = k + unit * 8 < p.in;
      const bf16* from = p.x + (exists ? k + unit * 8 : 0);
#pragma unroll
      for (int i = 0; i < kMine; ++i)
        copy_unit(place.stage() + target + 16 * i * kBoxRow, from + int64_t{row[i]} * p.in, exists);
      arrive_with_units(place.full());
    }
  }
}

__device__ inline uint32_t rounded(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Writes a warpgroup's half of a tile, BOXES at a time.
template <int BOXES> __device__ void write_results(const float (&sum)[128], const CUtensorMap& y,
    const Problem& p, const Tile& tile, int half, Box (&boxes)[BOXES], int thread) {
  const int group = 1 + half, row = tile.row + half * 64; // the barrier's number
  const bf16* bias = p.bias ? p.bias + int64_t{tile.expert} * p.out + tile.column : nullptr;
  // stmatrix: lane l gives the address of row l % 8 of matrix l / 8, two below each other.
  const int its_row = thread / 32 * 16 + thread % 16, its_column = thread % 32 / 16;
#pragma unroll
  for (int first = 0; first < kTileN / kBoxColumns; first += BOXES) {
    if (thread == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>()); // of the boxes before
    group_sync(group);
#pragma unroll
    for (int j = first * 8; j < (first + BOXES) * 8; j += 2) { // columns 8 j on
      float2 added[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = (j + i) * 8 + thread % 4 * 2;
        if (bias && tile.column + column < p.out)
          added[i] = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(bias + column));
      }
      uint8_t* to =
          boxes[j / 8 - first] + its_row * kBoxRow + ((j % 8 + its_column) ^ its_row % 8) * 16;
      const float* s = sum + 4 * j;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       shared_address(to)),
          "r"(rounded(s[0] + added[0].x, s[1] + added[0].y)),
          "r"(rounded(s[2] + added[0].x, s[3] + added[0].y)),
          "r"(rounded(s[4] + added[1].x, s[5] + added[1].y)),
          "r"(rounded(s[6] + added[1].x, s[7] + added[1].y))
          : "memory");
    }
    ptx::fence_proxy_async(ptx::space_shared);
    group_sync(group);
    for (int box = 0; box < BOXES; ++box) {
      const int column = tile.column + (first + box) * kBoxColumns, unit = thread % 8;
      if (row + 64 <= tile.end) {
        const int to[] = {column, row};
        if (thread == 0 && column < p.out)
          ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &y, to, boxes[box]);
      } else if (column + unit * 8 < p.out) { // not over the next expert's rows
        for (int r = thread / 8; r < 64 && row + r < tile.end; r += 16)
          *reinterpret_cast<uint4*>(p.y + int64_t{row + r} * p.out + column + unit * 8) =
              *reinterpret_cast<const uint4*>(boxes[box] + r * kBoxRow + (unit ^ r % 8) * 16);
      }
    }
    if (thread == 0) ptx::cp_async_bulk_commit_group();
  }
}
#endif

template <bool ACROSS, bool LISTED> __global__ __launch_bounds__(kThreads, 1) void product_kernel(
    const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weights,
    const __grid_constant__ CUtensorMap y, const Problem p) {
#if PITH_HOPPER
  extern __shared__ uint8_t memory[];
  auto& shared = shared_at_1024<Shared<LISTED>>(memory);
  if (threadIdx.x == 0) init_ring(shared.ring, LISTED ? 128 + 1 : 1);
  __syncthreads();
  const int group = int(threadIdx.x) / 128, thread = threadIdx.x % 128;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    const Place<kStages> place{shared.ring, 1};
    if constexpr (LISTED) fill_listed<ACROSS>(weights, p, place, thread);
    else if (thread == 0) fill_in_order<ACROSS>(x, weights, p, place);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    Place<kStages> place{shared.ring, 0};
    const int half = group - 1;
    Walk walk{p};
    for (Tile tile; walk.next(tile);) {
      float sum[128];
      multiply_stages<false, ACROSS>(
          sum, place, (p.in + kStep - 1) / kStep, half, [](uint8_t*, int) {
        if (LISTED) ptx::fence_proxy_async(ptx::space_shared);
      });
      write_results(sum, y, p, tile, half, shared.results[half], thread);
    }
    if (thread == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
  }
#endif
}
}

bool grouped_product(const void* x, const int32_t* row_of_slot, const void* weights, bool across,
    const int32_t* offsets, const void* bias, void* y, int64_t rows, int64_t experts, int64_t in,
    int64_t out) {
  const auto run = [&]<bool ACROSS, bool LISTED>() {
    constexpr int kBytes = sizeof(Shared<LISTED>) + 1024;
    static const unsigned blocks = persistent_blocks(product_kernel<ACROSS, LISTED>, kBytes);
    const bool fits = in % 8 == 0 && out % 8 == 0 && aligned<uint8_t, 16>({x, weights, y}, {}) &&
        aligned<uint8_t, 4>({bias}, {});
    if (blocks == 0 || !fits) return false;
    if (rows == 0) return true;
    const Problem p{static_cast<const bf16*>(x), row_of_slot, offsets,
        static_cast<const bf16*>(bias), static_cast<bf16*>(y), int(rows), int(experts), int(in),
        int(out)};
    product_kernel<ACROSS, LISTED><<<blocks, kThreads, kBytes, current_stream()>>>(
        LISTED ? CUtensorMap{} : tensor_map(kMapBf16, x, {in, rows}, {kStep, kTileM}),
        ACROSS ? tensor_map(kMapBf16, weights, {out, in, experts}, {kBoxColumns, kStep, 1})
               : tensor_map(kMapBf16, weights, {in, out, experts}, {kStep, kTileN, 1}),
        tensor_map(kMapBf16, y, {out, rows}, {kBoxColumns, 64}), p);
    launch_check("grouped_product");
    return true;
  };
  const auto choose = [&]<bool ACROSS>() {
    return row_of_slot ? run.template operator()<ACROSS, true>()
                       : run.template operator()<ACROSS, false>();
  };
  return across ? choose.template operator()<true>() : choose.template operator()<false>();
}
}
