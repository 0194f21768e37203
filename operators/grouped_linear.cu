// Grouped linear maps: biases, and weight gradients on Hopper: gradient[e] += dy[e]^T x[e] over
// expert e's rows, BF16 operands, sums in FP32.
// A persistent block computes tiles of kTileOut x kTileIn of an expert's gradient. One thread
// copies kTileRows rows of dy and x at a time into a ring of shared-memory stages (TMA); two
// warpgroups multiply (wgmma), each half of the tile, and hand sums in boxes to the copy engine,
// which adds them in the L2 cache. Each element is added to once: the same bits always.
// At 512 rows an expert the products take less than half of the time: the gradient is read and
// written once, 8 bytes for 512 multiply-adds. Alternatives: docs/performance.md.
#include <cuda.h>
#include <cuda/ptx>
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {
constexpr int kRows = 8; // of a block: kWarp x kRows threads
constexpr int kSplit = 16; // blocks that share an expert's rows

// Block (columns, expert, part of its rows).
template <class T, int N>
__global__ void bias_kernel(const T* bias, const int32_t* offsets, T* y, int64_t columns) {
  const int64_t expert = blockIdx.y, begin = expert == 0 ? 0 : offsets[expert - 1];
  const int64_t column = (blockIdx.x * int64_t{kWarp} + threadIdx.x) * N;
  if (column >= columns) return;
  const Vec<T, N> b = load<N>(bias + expert * columns + column);
  const int64_t first = begin + blockIdx.z * kRows + threadIdx.y;
  for (int64_t row = first; row < offsets[expert]; row += kSplit * kRows) {
    Vec<T, N> out = load<N>(y + row * columns + column);
    for (int j = 0; j < N; ++j) out.v[j] = from_float<T>(to_float(out.v[j]) + to_float(b.v[j]));
    store(y + row * columns + column, out);
  }
}

constexpr int kTileOut = 128, kTileIn = 256, kTileRows = 64, kStages = 4;
constexpr int kThreads = 3 * 128; // a warpgroup that copies and two that multiply
// A copy's box: kTileRows rows of 128 bytes, swizzled in groups of 8 rows.
constexpr int kBoxColumns = 64, kBoxBytes = kTileRows * 128;
[[maybe_unused]] constexpr int kGroupBytes = 8 * 128;
constexpr int kOutBoxes = kTileOut / kBoxColumns, kInBoxes = kTileIn / kBoxColumns;
constexpr int kStageBytes = (kOutBoxes + kInBoxes) * kBoxBytes;
// 64 rows of 128 bytes; a warpgroup keeps so many until they are copied.
constexpr int kSumColumns = 32, kWaiting = 2;

struct Shared {
  uint8_t stages[kStages][kStageBytes]; // boxes of dy, then of x
  float sums[2][kWaiting][64][kSumColumns]; // of both warpgroups
  uint64_t full[kStages], empty[kStages];
};
constexpr int kSharedBytes = sizeof(Shared) + 1024; // stages at 1024 bytes, for the swizzle

struct Problem {
  const int32_t* offsets; // (experts): the ends of their rows
  int experts, out, in;
};

struct Tile {
  int expert, out, in; // first row and column of the expert's gradient
  int begin, rows; // of dy and x
};

// Other GPUs' compiler passes do not know the instructions.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define PITH_HOPPER 1
#else
#define PITH_HOPPER 0
#endif

#if PITH_HOPPER
// This block's share of the tiles whose expert has rows.
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

namespace ptx = ::cuda::ptx;

__device__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ void wait(uint64_t* barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {}
}

// Starts to copy the box at (row, column); what lies outside becomes zeros.
__device__ void copy_box(
    const CUtensorMap& map, void* box, int column, int row, uint64_t* barrier) {
  const int place[] = {column, row};
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, box, &map, place, barrier);
}

// Rows (the products' inner dimension) of 128 bytes a box, for wgmma: boxes every kBoxBytes, groups
// of 8 rows every kGroupBytes, 128-byte swizzle.
__device__ uint64_t matrix_descriptor(const void* p) {
  return (shared_address(p) & 0x3FFFF) >> 4 | uint64_t{kBoxBytes >> 4} << 16 |
      uint64_t{kGroupBytes >> 4} << 32 | uint64_t{1} << 62;
}

// sum (64, 256) = a^T b, or += with `add`, over 16 rows. Thread t holds of row t / 32 * 16 + t % 32
// / 4 (and of the 8th below) two neighbouring columns of every eight from t % 4 * 2 on.
__device__ void multiply(float (&d)[128], uint64_t a, uint64_t b, bool add) {
  // clang-format off
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
      "}, %128, %129, add, 1, 1, 1, 1;\n"  // scales of a and b; both are given row by row
      "}"
      : R16(0), R16(16), R16(32), R16(48), R16(64), R16(80), R16(96), R16(112)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#undef R16
#undef R4
  // clang-format on
}

__device__ void copy_tiles(
    const CUtensorMap& dy, const CUtensorMap& x, const Problem& p, Shared& shared) {
  int stage = 0;
  uint32_t parity = 1; // the first round finds every stage empty
  for_each_tile(p, [&](const Tile& tile) {
    for (int row = 0; row < tile.rows; row += kTileRows) {
      wait(&shared.empty[stage], parity);
      ptx::mbarrier_arrive_expect_tx(
          ptx::sem_release, ptx::scope_cta, ptx::space_shared, &shared.full[stage], kStageBytes);
      uint8_t* box = shared.stages[stage];
      for (int i = 0; i < kOutBoxes; ++i, box += kBoxBytes)
        copy_box(dy, box, tile.out + i * kBoxColumns, tile.begin + row, &shared.full[stage]);
      for (int i = 0; i < kInBoxes; ++i, box += kBoxBytes)
        copy_box(x, box, tile.in + i * kBoxColumns, tile.begin + row, &shared.full[stage]);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  });
}

// Zeroes a stage's rows from `first` on, the next expert's. `thread` of 256.
__device__ void clear_rows(uint8_t* stage, int first, int thread) {
  const int vectors = (kTileRows - first) * 8; // of 16 bytes in each box
  for (int i = thread; i < vectors * (kOutBoxes + kInBoxes); i += 256)
    *reinterpret_cast<uint4*>(stage + i / vectors * kBoxBytes + first * 128 + i % vectors * 16) =
        uint4{0, 0, 0, 0};
  ptx::fence_proxy_async(ptx::space_shared);
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

// Adds sums to the gradient from the expert's `row` on, box by box.
__device__ void add_sums(const float (&sum)[128], const CUtensorMap& gradient, const Tile& tile,
    int row, float (&boxes)[kWaiting][64][kSumColumns], int barrier, int thread) {
#pragma unroll
  for (int box = 0; box < kTileIn / kSumColumns; ++box) {
    auto& staged = boxes[box % kWaiting];
    if (thread == 0) // the copy before the last has read this box
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kWaiting - 1>());
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
      const int column = i / 2 * 8 + thread % 4 * 2, at = 2 * (8 * box + i);
      const int swizzled = (column / 4 ^ r % 8) * 4 + column % 4; // in units of 16 bytes
      *reinterpret_cast<float2*>(&staged[r][swizzled]) = float2{sum[at], sum[at + 1]};
    }
    ptx::fence_proxy_async(ptx::space_shared);
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
    if (thread > 0) continue;
    const int place[] = {tile.in + box * kSumColumns, row, tile.expert};
    ptx::cp_reduce_async_bulk_tensor(
        ptx::space_global, ptx::space_shared, ptx::op_add, &gradient, place, &staged);
    ptx::cp_async_bulk_commit_group();
  }
}

__device__ void multiply_tiles(
    const CUtensorMap& gradient, const Problem& p, Shared& shared, int half, int thread) {
  int stage = 0;
  uint32_t parity = 0;
  for_each_tile(p, [&](const Tile& tile) {
    float sum[128];
    int reading = -1; // its products may still be under way
    for (int row = 0; row < tile.rows; row += kTileRows) {
      wait(&shared.full[stage], parity);
      uint8_t* boxes = shared.stages[stage];
      if (tile.rows - row < kTileRows) clear_rows(boxes, tile.rows - row, half * 128 + thread);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      for (int k = 0; k < kTileRows / 16; ++k)
        multiply(sum, matrix_descriptor(boxes + half * kBoxBytes + k * 2 * kGroupBytes),
            matrix_descriptor(boxes + kOutBoxes * kBoxBytes + k * 2 * kGroupBytes),
            row > 0 || k > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (reading >= 0 && thread == 0) ptx::mbarrier_arrive(&shared.empty[reading]);
      reading = stage;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
#pragma unroll
    for (float& value : sum) asm volatile("" : "+f"(value)::"memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (float& value : sum) asm volatile("" : "+f"(value)::"memory");
    if (thread == 0) ptx::mbarrier_arrive(&shared.empty[reading]);
    add_sums(sum, gradient, tile, tile.out + half * 64, shared.sums[half], 2 + half, thread);
  });
  if (thread == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>());
}

#endif

__global__ __launch_bounds__(kThreads, 1) void weight_gradient_kernel(
    const __grid_constant__ CUtensorMap dy, const __grid_constant__ CUtensorMap x,
    const __grid_constant__ CUtensorMap gradient, const Problem p) {
#if PITH_HOPPER
  extern __shared__ uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&shared.full[i], 1);
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&shared.empty[i], 2);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) copy_tiles(dy, x, p, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_tiles(gradient, p, shared, group - 1, static_cast<int>(threadIdx.x) % 128);
  }
#endif
}

// A contiguous tensor in boxes, sizes innermost first; 128 bytes swizzled.
CUtensorMap tensor_map(CUtensorMapDataType type, const void* data, cuuint32_t rank,
    const cuuint64_t* sizes, const cuuint32_t* box) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion(
              "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map;
  cuuint64_t strides[2] = {sizes[0] * (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2), 0};
  strides[1] = strides[0] * sizes[1];
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(&map, type, rank, const_cast<void*>(data), sizes, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail("grouped_weight_gradient", "no tensor map", __FILE__, __LINE__);
  return map;
}
}

bool grouped_weight_gradient(const void* dy, const void* x, const int32_t* offsets, float* gradient,
    int64_t rows, int64_t experts, int64_t out, int64_t in) {
  static const int processors = [] { // 0: another GPU
    int device = 0, major = 0, count = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "capability");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "processors");
    if (major != 9) return 0;
    check(cudaFuncSetAttribute(
              weight_gradient_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "grouped_weight_gradient");
    return count;
  }();
  const bool fits = out % 8 == 0 && in % 8 == 0 && aligned<uint8_t, 16>({dy, x, gradient}, {});
  if (processors == 0 || !fits) return false;
  if (rows == 0) return true;
  const auto rows_map = [&](const void* data, int64_t columns) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint32_t box[] = {kBoxColumns, kTileRows};
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, 2, sizes, box);
  };
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(in), static_cast<cuuint64_t>(out), static_cast<cuuint64_t>(experts)};
  const cuuint32_t box[] = {kSumColumns, 64, 1};
  const auto blocks = static_cast<unsigned>(processors);
  weight_gradient_kernel<<<blocks, kThreads, kSharedBytes, current_stream()>>>(rows_map(dy, out),
      rows_map(x, in), tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, gradient, 3, sizes, box),
      Problem{offsets, static_cast<int>(experts), static_cast<int>(out), static_cast<int>(in)});
  launch_check("grouped_weight_gradient");
  return true;
}

void add_expert_bias(Data bias, const int32_t* offsets, Data y, int64_t experts, int64_t columns) {
  if (experts * columns == 0) return;
  with_vectors(y.bf16, {bias, y}, {columns}, [&]<class T, int N>() {
    const dim3 grid(num_blocks(columns, kWarp * N), static_cast<unsigned>(experts), kSplit);
    bias_kernel<T, N><<<grid, dim3(kWarp, kRows), 0, current_stream()>>>(bias, offsets, y, columns);
  });
}
}
