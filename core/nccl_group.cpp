// NCCL, opened at run time beside libtorch_cuda. Provides NcclGroup, nccl_wait.
#include "core/transport.h"

#if PITH_CUDA
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <cstring>
#include <numeric>

namespace pith {
namespace {

struct Nccl {
#define PITH_NCCL_FUNCTIONS(F)                                                                  \
  F(GetUniqueId)                                                                                \
  F(CommInitRank)                                                                               \
  F(CommGetAsyncError) F(GetErrorString) F(GetLastError) F(GroupStart) F(GroupEnd) F(AllReduce) \
      F(AllGather) F(ReduceScatter) F(Reduce) F(Broadcast) F(Send) F(Recv)
#define PITH_NCCL_DECLARE(name) decltype(&nccl##name) name;
  PITH_NCCL_FUNCTIONS(PITH_NCCL_DECLARE)

  Nccl() {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr)
      PITH_FAIL_HINT("./pith setup --cuda installs it", "NCCL cannot be opened: {}", dlerror());
#define PITH_NCCL_LOAD(name)                                             \
  name = reinterpret_cast<decltype(name)>(dlsym(library, "nccl" #name)); \
  PITH_CHECK(name != nullptr, "libnccl.so.2 has no nccl{}", #name);
    PITH_NCCL_FUNCTIONS(PITH_NCCL_LOAD)
  }
};

const Nccl& nccl() {
  static const Nccl table;
  return table;
}

void check(ncclResult_t code) {
  PITH_CHECK(code == ncclSuccess, "NCCL: {}: {}", nccl().GetErrorString(code),
             nccl().GetLastError(nullptr));
}

void check(cudaError_t code) {
  PITH_CHECK(code == cudaSuccess, "CUDA: {}", cudaGetErrorString(code));
}

std::shared_ptr<CUevent_st> record_event(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  std::shared_ptr<CUevent_st> owner(event, [](cudaEvent_t e) { cudaEventDestroy(e); });
  check(cudaEventRecord(event, stream));
  return owner;
}

ncclDataType_t sum_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return ncclDouble;
    case at::kLong:
      return ncclInt64;
    case at::kInt:
      return ncclInt32;
    default:
      return ncclFloat;
  }
}

Tensor widen(const Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
}

bool all_equal(std::span<const int64_t> sizes) {
  return std::ranges::all_of(sizes, [&](int64_t size) { return size == sizes[0]; });
}

}  // namespace

void nccl_wait(Operation& operation) {
  const cudaStream_t current =
      c10::cuda::getCurrentCUDAStream(operation.in.device().index()).stream();
  check(cudaStreamWaitEvent(current, operation.done.get()));
}

NcclGroup::NcclGroup(int64_t size, int64_t rank, at::Device device,
                     const std::function<std::string(const std::string&)>& share)
    : size_(size),
      rank_(rank),
      device_(device),
      stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index()).stream()) {
  ncclUniqueId id{};
  if (rank == 0) check(nccl().GetUniqueId(&id));
  const std::string shared = share({id.internal, sizeof(id.internal)});
  PITH_CHECK(shared.size() == sizeof(id.internal), "the group's NCCL id arrived damaged");
  std::memcpy(id.internal, shared.data(), shared.size());
  check(cudaSetDevice(device.index()));
  check(nccl().CommInitRank(&comm_, static_cast<int>(size), id, static_cast<int>(rank)));
  watch("NCCL", std::numeric_limits<double>::infinity(), [comm = comm_] {
    ncclResult_t state = ncclSuccess;
    if (nccl().CommGetAsyncError(comm, &state) == ncclSuccess && state != ncclSuccess &&
        state != ncclInProgress) {
      end_all_ranks(fmt::format("NCCL reports an error: {} ({})", nccl().GetErrorString(state),
                                comm_context()));
    }
    return false;
  });
}

void NcclGroup::start(Operation& operation) {
  Tensor out = operation.out, in = operation.in;
  if (operation.kind == Kind::all_reduce) {
    out = in = widen(in);
  } else if (operation.kind == Kind::reduce_scatter) {
    in = widen(in);
    if (out.scalar_type() != in.scalar_type()) out = at::empty(out.sizes(), in.options());
  }
  // After what the current stream holds now.
  const auto ready = record_event(c10::cuda::getCurrentCUDAStream(device_.index()).stream());
  check(cudaStreamWaitEvent(stream_, ready.get()));
  check(nccl().GroupStart());
  call(operation, out, in);
  check(nccl().GroupEnd());
  operation.done = record_event(stream_);
  operation.finish = [out, in, to = operation.out] {
    if (!out.is_same(to)) to.copy_(out);
  };
  watch(operation.what, operation.limit_s, [device = device_.index(), event = operation.done] {
    cudaSetDevice(device);  // else a context on the first GPU would be made
    return cudaEventQuery(event.get()) != cudaErrorNotReady;
  });
}

// Bytes travel, except where they are summed.
void NcclGroup::call(const Operation& operation, const Tensor& out, const Tensor& in) {
  auto* to = static_cast<char*>(out.data_ptr());
  auto* from = static_cast<char*>(in.data_ptr());
  const size_t width = in.element_size();
  switch (operation.kind) {
    case Kind::all_reduce: {
      const ncclRedOp_t op = operation.reduce == Reduce::sum   ? ncclSum
                             : operation.reduce == Reduce::max ? ncclMax
                                                               : ncclMin;
      check(nccl().AllReduce(from, to, in.numel(), sum_type(in), op, comm_, stream_));
      return;
    }
    case Kind::all_gather:
      if (all_equal(operation.recv)) {
        check(nccl().AllGather(from, to, in.nbytes(), ncclInt8, comm_, stream_));
        return;
      }
      for (int i = 0; i < size_; ++i) {
        const size_t size = operation.recv[i] * width;
        check(nccl().Broadcast(i == rank_ ? from : to, to, size, ncclInt8, i, comm_, stream_));
        to += size;
      }
      return;
    case Kind::reduce_scatter:
      if (all_equal(operation.send)) {
        check(nccl().ReduceScatter(from, to, out.numel(), sum_type(in), ncclSum, comm_, stream_));
        return;
      }
      for (int i = 0; i < size_; ++i) {
        check(nccl().Reduce(from, i == rank_ ? to : nullptr, operation.send[i], sum_type(in),
                            ncclSum, i, comm_, stream_));
        from += operation.send[i] * width;
      }
      return;
    case Kind::all_to_all:
      for (int i = 0; i < size_; ++i) {
        const size_t send = operation.send[i] * width, recv = operation.recv[i] * width;
        if (send > 0) check(nccl().Send(from, send, ncclInt8, i, comm_, stream_));
        if (recv > 0) check(nccl().Recv(to, recv, ncclInt8, i, comm_, stream_));
        from += send;
        to += recv;
      }
      return;
    case Kind::exchange:
      for (const auto& [peer, tensor, is_send] : operation.messages) {
        const int other = narrow<int>(peer);
        void* data = tensor.data_ptr();
        if (tensor.numel() == 0) continue;
        check(is_send ? nccl().Send(data, tensor.nbytes(), ncclInt8, other, comm_, stream_)
                      : nccl().Recv(data, tensor.nbytes(), ncclInt8, other, comm_, stream_));
      }
      return;
    case Kind::broadcast:
      check(nccl().Broadcast(from, to, in.nbytes(), ncclInt8, narrow<int>(operation.root), comm_,
                             stream_));
  }
}

}  // namespace pith
#endif  // PITH_CUDA
