// y = x W[e] + bias[e] over each expert's rows, on Hopper: BF16 operands, sums in FP32, rounded
// once; and, of listed rows, SwiGLU of y. A persistent block computes tiles of kTileM x kTileN. The
// rounded results of one wait in registers: SwiGLU is computed, and the copy engine writes, beside
// the next tile's products.
#include "operators/hopper.cuh"

namespace pith::cuda {
namespace {
struct Problem {
  const bf16* x; // (any, in)
  const int32_t* listed; // (rows) of x, or null: x is (rows, in)
  const int32_t* offsets; // (experts): the ends of their rows
  const bf16* bias; // (experts, width) or null
  bf16* y; // (rows, halves, width)
  bf16* activation; // (rows, halves * width / 2)
  int rows, experts, in, width;
  SwigluForm form;
};

constexpr int kStages = 4;
template <bool ACTIVATE> constexpr int kBoxes = ACTIVATE ? 1 : 2; // listed rows need L1's room
using Box = uint8_t[16 * kBoxRow]; // of a warp
template <bool ACTIVATE> struct Shared {
  Ring<kStages> ring;
  alignas(1024) Box results[8][kBoxes<ACTIVATE>];
};
// Gates and ups apart: a tile has kTileN / 2 columns of each. Across, they alternate.
template <bool ACROSS, bool ACTIVATE> constexpr int kHalves = ACTIVATE && !ACROSS ? 2 : 1;

struct Tile {
  int expert, row, end, column; // end: of the expert's rows; column: of `width`
};

#if PITH_HOPPER
// This block's tiles of so many columns, kBeside at most beside each other: what runs at one
// time reads few rows and few weights, from L2.
constexpr int kBeside = 8;
struct Walk {
  const Problem& p;
  const int columns;
  int i = int(blockIdx.x), expert = 0, before = 0; // tiles of earlier experts
  int begin = 0, end = p.offsets[0];

  __device__ bool next(Tile& tile) {
    const int across = (p.width + columns - 1) / columns;
    for (int count; i >= before + (count = (end - begin + kTileM - 1) / kTileM * across);) {
      before += count;
      if (++expert == p.experts) return false;
      begin = end, end = p.offsets[expert];
    }
    const int of_group = kBeside * ((end - begin + kTileM - 1) / kTileM);
    const int first = (i - before) / of_group * kBeside, place = (i - before) % of_group;
    const int beside = min(kBeside, across - first);
    tile = {expert, begin + place / beside * kTileM, end, (first + place % beside) * columns};
    i += int(gridDim.x);
    return true;
  }
};

// Thread 0 copies a stage's weights: (experts, halves, width, in), or, ACROSS, (experts, in,
// width).
template <bool ACROSS, int HALVES> __device__ void copy_weights(
  const CUtensorMap& weights, const Tile& tile, int k, uint8_t* box, uint64_t* full) {
  if constexpr (ACROSS)
    for (int i = 0; i < kTileN / kBoxColumns; ++i, box += kStepBox)
      copy_box(weights, box, {tile.column + i * kBoxColumns, k, tile.expert}, full);
  else
    for (int i = 0; i < HALVES; ++i, box += kTileN / HALVES * kBoxRow)
      copy_box(weights, box, {k, tile.column, tile.expert * HALVES + i}, full);
}

template <bool ACROSS> __device__ void fill_in_order(
  const CUtensorMap& x, const CUtensorMap& weights, const Problem& p, Place<kStages> place) {
  Walk walk{p, kTileN};
  for (Tile tile; walk.next(tile);)
    for (int k = 0; k < p.in; k += kStep, place.next()) {
      wait(place.empty(), place.parity);
      expect(place.full(), kStageBytes);
      copy_box(x, place.stage(), {k, tile.row}, place.full());
      copy_weights<ACROSS, 1>(weights, tile, k, place.stage() + kBytesA, place.full());
    }
}

template <bool ACROSS> __device__ void fill_listed(
  const CUtensorMap& weights, const Problem& p, Place<kStages> place, int thread) {
  constexpr int kHalf = kHalves<ACROSS, true>;
  constexpr int kMine = kTileM / 16; // rows first + 16 i
  const int unit = thread % 8, first = thread / 8;
  const int target = first * kBoxRow + (unit ^ first % 8) * 16;
  Walk walk{p, kTileN / kHalf};
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
        copy_weights<ACROSS, kHalf>(weights, now, k, place.stage() + kBytesA, place.full());
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
__device__ inline float half_of(uint32_t pair, int i) {
  return __uint_as_float(i ? pair & 0xffff0000 : pair << 16);
}

// A warp's 16 rows of a tile, on their way.
template <bool ACROSS, bool ACTIVATE> struct Results {
  static constexpr int HALVES = kHalves<ACROSS, ACTIVATE>;
  static constexpr int kParts = ACTIVATE ? 20 : 4;
  const Problem& p;
  const CUtensorMap &y_map, &activation_map;
  Box (&boxes)[kBoxes<ACTIVATE>];
  const int lane = threadIdx.x % kWarp;
  Tile tile{};
  uint32_t pair[kTileN / 4]; // as multiply()'s sums
  int turn = 0;

  __device__ int column(int box) { return tile.column + box % (4 / HALVES) * kBoxColumns; }

  // In advance of round().
  __device__ void fetch_bias(uint32_t (&bias)[kTileN / 8], const Tile& next) {
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const int column = next.column + 8 * j + lane % 4 * 2;
      const bf16* from = p.bias + int64_t{next.expert} * p.width + column;
      bias[j] = ACROSS && p.bias && column < p.width ? *reinterpret_cast<const uint32_t*>(from) : 0;
    }
  }
  __device__ void round(const float (&sum)[128], const uint32_t (&bias)[kTileN / 8]) {
#pragma unroll
    for (int i = 0; i < kTileN / 4; ++i) {
      const float* s = sum + 2 * i;
      pair[i] = ACROSS ? rounded(s[0] + half_of(bias[i / 2], 0), s[1] + half_of(bias[i / 2], 1))
                       : rounded(s[0], s[1]);
    }
  }

  // A box of columns from `column` of its half on, or, by fill(box), a part of it.
  template <class F> __device__ void write_box(bool first, bool last, const CUtensorMap& map,
    bf16* to, int width, int halves, int column, int half, F&& fill) {
    if (tile.row >= tile.end || column >= width) return;
    if (first) {
      if (lane == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kBoxes<ACTIVATE> - 1>());
      __syncwarp();
    }
    uint8_t* box = boxes[turn];
    int here = lane;
    asm volatile("" : "+r"(here)); // kept addresses would be spilled
    fill(box, here);
    if (!last) return;
    turn = (turn + 1) % kBoxes<ACTIVATE>;
    ptx::fence_proxy_async(ptx::space_shared);
    __syncwarp();
    if (tile.row + 16 <= tile.end) {
      const int at[] = {column, half, tile.row};
      if (lane == 0) ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &map, at, box);
    } else if (const int unit = lane % 8; column + unit * 8 < width) { // not over the next
      for (int r = lane / 8; r < 16 && tile.row + r < tile.end; r += 4)
        *reinterpret_cast<uint4*>(to + (int64_t{tile.row + r} * halves + half) * width + column +
          unit * 8) = *reinterpret_cast<const uint4*>(box + r * kBoxRow + (unit ^ r % 8) * 16);
    }
    if (lane == 0) ptx::cp_async_bulk_commit_group();
  }

  // Eight columns of rows lane / 4 and of the 8th below. Lane l gives the address of row l.
  __device__ void put(uint8_t* box, int lane, int unit, uint32_t upper, uint32_t lower) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(
                   shared_address(box + lane % 16 * kBoxRow + (unit ^ lane % 8) * 16)),
      "r"(upper), "r"(lower)
      : "memory");
  }

  template <int BOX> __device__ void write_y() {
    const int to = column(BOX);
    write_box(
      true, true, y_map, p.y, p.width, HALVES, to, BOX * HALVES / 4, [&](uint8_t* box, int lane) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        put(box, lane, i, pair[16 * BOX + 2 * i], pair[16 * BOX + 2 * i + 1]);
    });
  }

  // Eight columns. Four chains one after the other would hold up the products.
  template <int EIGHT> __device__ void write_activation() {
    constexpr int kBox = EIGHT / 8, kUnit = EIGHT % 8;
    const auto gate = [&](int i) {
      if constexpr (HALVES == 2) return half_of(pair[2 * EIGHT + i / 2], i % 2);
      else return at_most(half_of(pair[4 * EIGHT + i], 0), p.form.limit);
    };
    const auto up = [&](int i) {
      if constexpr (HALVES == 2) return half_of(pair[32 + 2 * EIGHT + i / 2], i % 2);
      else return clamped(half_of(pair[4 * EIGHT + i], 1), p.form.limit) + p.form.plus;
    };
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      value[i] = exp_minus(HALVES == 2 ? gate(i) : p.form.alpha * gate(i));
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = inverse(1.0f + value[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] *= gate(i) * up(i);
    const int to = tile.column * HALVES / 2 + kBox * kBoxColumns;
    write_box(kUnit == 0, kUnit == 7, activation_map, p.activation, p.width * HALVES / 2, 1, to, 0,
      [&](uint8_t* box, int lane) {
      if constexpr (HALVES == 2) {
        put(box, lane, kUnit, rounded(value[0], value[1]), rounded(value[2], value[3]));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + i % 2 * 8, place = i / 2 * 4 + lane % 4;
          reinterpret_cast<bf16*>(box + row * kBoxRow + (kUnit ^ row % 8) * 16)[place] =
            __float2bfloat16_rn(value[i]);
        }
      }
    });
  }
  // Four boxes of y, then eight columns each of the activation.
  template <int PART> __device__ bool write_part() {
    if constexpr (PART < 4) write_y<PART>();
    else write_activation<PART - 4>();
    return true;
  }
  // Compiles to a jump.
  template <int... PART> __device__ void write_part(int part, std::integer_sequence<int, PART...>) {
    ((part == PART && write_part<PART>()) || ...);
  }
  __device__ void write_parts(int from, int to) {
    for (int part = from; part < to; ++part)
      write_part(part, std::make_integer_sequence<int, kParts>());
  }
};
#endif

template <bool ACROSS, bool ACTIVATE>
__global__ __launch_bounds__(kThreads, 1) void product_kernel(const __grid_constant__ CUtensorMap x,
  const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap y,
  const __grid_constant__ CUtensorMap activation, const __grid_constant__ Problem p) {
#if PITH_HOPPER
  extern __shared__ uint8_t memory[];
  auto& shared = shared_at_1024<Shared<ACTIVATE>>(memory);
  constexpr int kColumns = kTileN / kHalves<ACROSS, ACTIVATE>;
  if (threadIdx.x == 0) init_ring(shared.ring, ACTIVATE ? 128 + 1 : 1);
  __syncthreads();
  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0), thread = threadIdx.x % 128;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(ACTIVATE ? 56 : 24));
    const Place<kStages> place{shared.ring, 1};
    if constexpr (ACTIVATE) fill_listed<ACROSS>(weights, p, place, thread);
    else if (thread == 0) fill_in_order<ACROSS>(x, weights, p, place);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(ACTIVATE ? 224 : 240));
    Place<kStages> place{shared.ring, 0};
    const int half = group - 1, warp = int(threadIdx.x) / kWarp - 4;
    Results<ACROSS, ACTIVATE> results{p, y, activation, shared.results[warp]};
    Walk walk{p, kColumns};
    const int steps = (p.in + kStep - 1) / kStep;
    for (Tile tile; walk.next(tile);) {
      float sum[128];
      uint32_t bias[kTileN / 8];
      multiply_stages<false, ACROSS>(sum, place, steps, half, [](uint8_t*, int) {
        if (ACTIVATE) ptx::fence_proxy_async(ptx::space_shared);
      }, [&](int step) {
        const bool last = step + 1 == steps;
        if (step < results.kParts) results.write_parts(step, last ? results.kParts : step + 1);
        if (last) results.fetch_bias(bias, tile);
      });
      results.round(sum, bias);
      results.tile = tile;
      results.tile.row += warp * 16;
    }
    results.write_parts(0, results.kParts);
    if (thread % kWarp == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
  }
#endif
}
}

bool grouped_product(const void* x, const int32_t* row_of_slot, const void* weights, bool across,
  const int32_t* offsets, const void* bias, void* y, void* activation, const SwigluForm& form,
  int64_t rows, int64_t experts, int64_t in, int64_t out) {
  const auto run = [&]<bool ACROSS, bool ACTIVATE>() {
    constexpr int kBytes = sizeof(Shared<ACTIVATE>) + 1024, kHalf = kHalves<ACROSS, ACTIVATE>;
    static const unsigned blocks = persistent_blocks(product_kernel<ACROSS, ACTIVATE>, kBytes);
    const int64_t width = out / kHalf, active = out / 2;
    const bool fits = in % 8 == 0 && width % 8 == 0 && (ACROSS || !bias) &&
      (!ACTIVATE || (active % 8 == 0 && (ACROSS ? form.alternating : form == SwigluForm()))) &&
      aligned<uint8_t, 16>({x, weights, y, activation}, {}) && aligned<uint8_t, 4>({bias}, {});
    if (blocks == 0 || !fits) return false;
    if (rows == 0) return true;
    const Problem p{static_cast<const bf16*>(x), row_of_slot, offsets,
      static_cast<const bf16*>(bias), static_cast<bf16*>(y), static_cast<bf16*>(activation),
      int(rows), int(experts), int(in), int(width), form};
    const auto results = [&](void* data, int64_t columns, int64_t halves) {
      return tensor_map(kMapBf16, data, {columns, halves, rows}, {kBoxColumns, 1, 16});
    };
    product_kernel<ACROSS, ACTIVATE><<<blocks, kThreads, kBytes, current_stream()>>>(
      ACTIVATE ? CUtensorMap{} : tensor_map(kMapBf16, x, {in, rows}, {kStep, kTileM}),
      ACROSS
        ? tensor_map(kMapBf16, weights, {out, in, experts}, {kBoxColumns, kStep, 1})
        : tensor_map(kMapBf16, weights, {in, width, experts * kHalf}, {kStep, kTileN / kHalf, 1}),
      results(y, width, kHalf), ACTIVATE ? results(activation, active, 1) : CUtensorMap{}, p);
    launch_check("grouped_product");
    return true;
  };
  if (across)
    return activation ? run.template operator()<true, true>()
                      : run.template operator()<true, false>();
  return activation ? run.template operator()<false, true>()
                    : run.template operator()<false, false>();
}
}
