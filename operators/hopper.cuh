// What kernels of grouped products share: Hopper's copies (TMA), barriers and products (wgmma).
// Operands lie in shared memory as boxes of rows of 128 bytes, 64 BF16 elements, which the hardware
// swizzles in groups of 8 rows; a box begins at a multiple of 1,024 bytes.
#pragma once
#include <cuda.h>

#include <cuda/ptx>

#include "operators/kernel.cuh"

// Other GPUs' passes of the compiler do not know the instructions.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define PITH_HOPPER 1
#else
#define PITH_HOPPER 0
#endif

namespace pith::cuda {
namespace {

namespace ptx = ::cuda::ptx;

constexpr int kThreads = 3 * 128;  // a warpgroup that copies and two that multiply
constexpr int kBoxColumns = 64, kRowBytes = 128;
[[maybe_unused]] constexpr int kGroupBytes = 8 * kRowBytes;

// The stages of a ring between one thread that copies and two warpgroups that multiply.
template <int STAGES> struct Ring {
  uint64_t full[STAGES], empty[STAGES];
};

#if PITH_HOPPER
__device__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
template <class Shared> __device__ Shared& shared_memory() {  // of sizeof(Shared) + 1024 bytes
  extern __shared__ uint8_t memory[];
  return *reinterpret_cast<Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
}

template <int STAGES> __device__ void init(Ring<STAGES>& ring) {
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : ring.full) ptx::mbarrier_init(&barrier, 1);
    for (uint64_t& barrier : ring.empty) ptx::mbarrier_init(&barrier, 2);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  __syncthreads();
}
// Where one of them stands: the copying thread begins with parity 1, as all stages are empty.
template <int STAGES> struct RingPlace {
  uint32_t parity;
  int stage = 0;
  __device__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
__device__ void wait(uint64_t* barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {}
}
__device__ void expect(uint64_t* barrier, int bytes) {
  ptx::mbarrier_arrive_expect_tx(
      ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier, static_cast<uint32_t>(bytes));
}
// Starts to copy the box at (x, y, z) of `map`; what lies outside of it becomes zeros.
__device__ void copy_box(
    const CUtensorMap& map, void* box, int x, int y, int z, uint64_t* barrier) {
  const int place[] = {x, y, z};
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, box, &map, place, barrier);
}
__device__ void sync_warpgroup(int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

// A matrix for wgmma. BY_ROWS: each row of a box is one of the products' inner dimension, boxes of
// 64 columns follow each other after box_bytes; else a row is one row or column of the result.
template <bool BY_ROWS> __device__ uint64_t matrix_descriptor(const void* p, int box_bytes = 16) {
  return (shared_address(p) & 0x3FFFF) >> 4 | static_cast<uint64_t>(box_bytes >> 4) << 16 |
      uint64_t{kGroupBytes >> 4} << 32 | uint64_t{1} << 62;
}
// Bytes from one 16 of the inner dimension to the next.
template <bool BY_ROWS> constexpr int kNext16 = BY_ROWS ? 16 * kRowBytes : 32;

// sum (64, 256) = a b, or += with `add`, over 16 of the inner dimension. Thread t holds of row t /
// 32 * 16 + t % 32 / 4 (and of the 8th below) two neighbouring columns of every eight from t % 4 *
// 2 on.
template <bool A_BY_ROWS, bool B_BY_ROWS>
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
      "}, %128, %129, add, 1, 1, %131, %132;\n"
      "}"
      : R16(0), R16(16), R16(32), R16(48), R16(64), R16(80), R16(96), R16(112)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A_BY_ROWS), "n"(B_BY_ROWS));
#undef R16
#undef R4
  // clang-format on
}

// The products of one tile by one warpgroup: its part of each stage begins at `a` and `b` of it.
// begin(stage): before its products; `steps` stages of 64 of the inner dimension.
template <bool A_BY_ROWS, bool B_BY_ROWS, int STAGES, class Stages, class Begin>
__device__ void multiply_stages(float (&sum)[128], Stages& stages, Ring<STAGES>& ring,
    RingPlace<STAGES>& at, int steps, int a, int b, int box_bytes, bool first_thread,
    const Begin& begin) {
  int reading = -1;  // the stage whose products may still be under way
  for (int step = 0; step < steps; ++step) {
    wait(&ring.full[at.stage], at.parity);
    const uint8_t* stage = stages[at.stage];
    begin(step, stages[at.stage]);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i)
      multiply<A_BY_ROWS, B_BY_ROWS>(sum,
          matrix_descriptor<A_BY_ROWS>(stage + a + i * kNext16<A_BY_ROWS>, box_bytes),
          matrix_descriptor<B_BY_ROWS>(stage + b + i * kNext16<B_BY_ROWS>, box_bytes),
          step > 0 || i > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (reading >= 0 && first_thread) ptx::mbarrier_arrive(&ring.empty[reading]);
    reading = at.stage;
    at.next();
  }
#pragma unroll
  for (float& value : sum) asm volatile("" : "+f"(value)::"memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (float& value : sum) asm volatile("" : "+f"(value)::"memory");
  if (first_thread) ptx::mbarrier_arrive(&ring.empty[reading]);
}
#endif

// A contiguous tensor (z, y, x) in boxes, 128 bytes swizzled.
struct Extent {
  int64_t x, y, z = 1;
};
CUtensorMap tensor_map(
    CUtensorMapDataType type, const void* data, const Extent& size, const Extent& box) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion(
              "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const auto bytes = static_cast<uint64_t>(type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2);
  const auto x = static_cast<cuuint64_t>(size.x), y = static_cast<cuuint64_t>(size.y);
  const cuuint64_t sizes[] = {x, y, static_cast<cuuint64_t>(size.z)};
  const cuuint64_t strides[] = {x * bytes, x * y * bytes};
  const cuuint32_t boxes[] = {static_cast<cuuint32_t>(box.x), static_cast<cuuint32_t>(box.y),
      static_cast<cuuint32_t>(box.z)};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, type, 3, const_cast<void*>(data), sizes, strides, boxes,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail("tensor_map", "no tensor map", __FILE__, __LINE__);
  return map;
}

// Processors of a Hopper GPU, of which each gets one block; 0 on other GPUs.
template <class Kernel> int hopper_processors(Kernel* kernel, size_t shared_bytes) {
  int device = 0, major = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "capability");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "processors");
  if (major != 9) return 0;
  check(cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
      "shared memory");
  return count;
}

}  // namespace
}  // namespace pith::cuda
