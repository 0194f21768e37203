// What the grouped products on Hopper share: a persistent block of three warpgroups; the first
// fills a ring of shared-memory stages, the others multiply (wgmma), each 64 of 128 rows.
#pragma once
#include <cuda.h>
#include <cuda/ptx>
#include "operators/kernel.cuh"

namespace pith::cuda {
// A stage: kStep of the products' inner dimension, of a tile's kTileM rows, then of its kTileN
// columns, in boxes of rows of 128 bytes (kBoxColumns numbers), at multiples of 1024 bytes. Groups
// of 8 rows are swizzled in units of 16 bytes.
constexpr int kTileM = 128, kTileN = 256, kStep = 64, kThreads = 3 * 128;
constexpr int kBoxRow = 128, kBoxColumns = kBoxRow / 2, kGroupBytes = 8 * kBoxRow;
constexpr int kBytesA = kTileM * kStep * 2, kStageBytes = kBytesA + kTileN * kStep * 2;
constexpr int kStepBox = kStep * kBoxRow; // bytes of a box whose rows are of the inner dimension

template <int STAGES> struct Ring {
  uint8_t stages[STAGES][kStageBytes];
  uint64_t full[STAGES], empty[STAGES];
};

// Other GPUs' compiler passes do not know the instructions.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define PITH_HOPPER 1
namespace ptx = ::cuda::ptx;

__device__ inline uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

template <class T> __device__ T& shared_at_1024(uint8_t* memory) {
  return *reinterpret_cast<T*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
}

__device__ inline void wait(uint64_t* barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {}
}

__device__ inline void group_sync(int number, int threads = 128) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

template <int STAGES> __device__ void init_ring(Ring<STAGES>& ring, int fillers) {
  for (int i = 0; i < STAGES; ++i) {
    ptx::mbarrier_init(&ring.full[i], uint32_t(fillers)); // arrivals that fill a stage
    ptx::mbarrier_init(&ring.empty[i], 2); // warpgroups
  }
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
}

// Where a role stands in the ring. A filler's first round finds every stage empty: parity 1.
template <int STAGES> struct Place {
  Ring<STAGES>& ring;
  uint32_t parity;
  int at = 0;
  __device__ uint8_t* stage() { return ring.stages[at]; }
  __device__ uint64_t* full() { return &ring.full[at]; }
  __device__ uint64_t* empty() { return &ring.empty[at]; }
  __device__ void next() {
    if (++at == STAGES) at = 0, parity ^= 1;
  }
};

// Arrives, and makes the barrier wait for so many bytes of copy_box().
__device__ inline void expect(uint64_t* barrier, int bytes) {
  ptx::mbarrier_arrive_expect_tx(
    ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier, uint32_t(bytes));
}

// Starts to copy a box (TMA); `from`: innermost first; what lies outside becomes zeros.
template <size_t RANK> __device__ void copy_box(
  const CUtensorMap& map, void* box, const int (&from)[RANK], uint64_t* barrier) {
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, box, &map, from, barrier);
}

// Starts to copy 16 bytes, or zeros.
__device__ inline void copy_unit(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
    "l"(from), "r"(exists ? 16 : 0)
    : "memory");
}
// Arrives once this thread's copy_unit()s so far are there.
__device__ inline void arrive_with_units(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
    : "memory");
}

// The lower half of wgmma's descriptor of a matrix. The inner dimension runs along a box's rows, or
// across them, in boxes kStepBox apart.
__device__ inline uint32_t matrix_at(const void* p) {
  return (shared_address(p) & 0x3FFFF) >> 4 | uint32_t{kStepBox >> 4} << 16;
}
// Bytes between matrices of 16 of the inner dimension.
template <bool ACROSS> constexpr int kMatrixBytes = ACROSS ? 2 * kGroupBytes : 32;

// sum (64, 256) = a b, or += with `add`, over 16 of the inner dimension. Thread t holds of row t /
// 32 * 16 + t % 32 / 4 (and of the 8th below) two neighbouring columns of every eight from t % 4 *
// 2 on.
template <bool ACROSS_A, bool ACROSS_B>
__device__ void multiply(float (&d)[128], uint32_t a, uint32_t b, bool add) {
  constexpr uint64_t kUpper = uint64_t{kGroupBytes >> 4 | 1 << 30} << 32;
  // clang-format off
#define FIVE(i, a, b, c, d, e) "%" #i #a ",%" #i #b ",%" #i #c ",%" #i #d ",%" #i #e ","
#define TEN(i) FIVE(i, 0, 1, 2, 3, 4) FIVE(i, 5, 6, 7, 8, 9)
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11)
      "%120,%121,%122,%123,%124,%125,%126,%127"
      "}, %128, %129, add, 1, 1, %131, %132;\n"
      "}"
      : R16(0), R16(16), R16(32), R16(48), R16(64), R16(80), R16(96), R16(112)
      : "l"(kUpper | a), "l"(kUpper | b), "r"(int(add)), "n"(ACROSS_A), "n"(ACROSS_B));
#undef R16
#undef R4
#undef TEN
#undef FIVE
  // clang-format on
}

// sum: a warpgroup's `half` of a tile over so many stages from `place` on; ready(stage, step) comes
// before a stage's products and fences what the TMA has not written; meanwhile(step) runs beside
// them.
template <bool ACROSS_A, bool ACROSS_B, int STAGES, class F, class G>
__device__ void multiply_stages(
  float (&sum)[128], Place<STAGES>& place, int steps, int half, F&& ready, G&& meanwhile) {
  const bool speaks = threadIdx.x % 128 == 0;
  const uint32_t first = matrix_at(place.ring.stages);
  uint64_t* reading = nullptr; // `empty` of the stage whose products may still be under way
  for (int step = 0; step < steps; ++step) {
    wait(place.full(), place.parity);
    ready(place.stage(), step);
    const uint32_t b = first + uint32_t(place.at * (kStageBytes >> 4));
    const uint32_t a = b + uint32_t(half * (kBytesA / 2 >> 4));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < kStep / 16; ++k)
      multiply<ACROSS_A, ACROSS_B>(sum, a + k * (kMatrixBytes<ACROSS_A> >> 4),
        b + (kBytesA + k * kMatrixBytes<ACROSS_B> >> 4), step > 0 || k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    meanwhile(step);
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (speaks && reading) ptx::mbarrier_arrive(reading);
    reading = place.empty();
    place.next();
  }
#pragma unroll
  for (float& value: sum) asm volatile("" : "+f"(value)::"memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (float& value: sum) asm volatile("" : "+f"(value)::"memory");
  if (speaks) ptx::mbarrier_arrive(reading);
}
#else
#define PITH_HOPPER 0
#endif

constexpr auto kMapBf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
// A contiguous tensor in boxes, sizes innermost first; 128 bytes swizzled.
inline CUtensorMap tensor_map(CUtensorMapDataType type, const void* data,
  std::initializer_list<int64_t> its_sizes, std::initializer_list<cuuint32_t> box) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
      "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  cuuint64_t sizes[3] = {}, strides[3] = {type == kMapBf16 ? 2u : 4u};
  cuuint32_t rank = 0;
  for (const int64_t size: its_sizes) {
    sizes[rank] = cuuint64_t(size);
    if (rank < 2) strides[rank + 1] = strides[rank] * sizes[rank];
    ++rank;
  }
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, type, rank, const_cast<void*>(data), sizes, strides + 1,
    box.begin(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail("grouped product", "no tensor map", __FILE__, __LINE__);
  return map;
}

// Blocks of a kernel with so much shared memory, one a processor; 0: no Hopper GPU.
template <class Kernel> unsigned persistent_blocks(Kernel* kernel, int bytes) {
  int device = 0, major = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "capability");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "processors");
  if (major != 9) return 0;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
    "shared memory");
  return unsigned(count);
}
}
