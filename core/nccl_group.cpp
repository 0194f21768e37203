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
  F(GetUniqueId) F(CommInitRank) F(CommGetAsyncError) F(GetErrorString) F(GetLastError)         \
  F(GroupStart) F(GroupEnd) F(AllReduce) F(AllGather) F(ReduceScatter) F(Reduce) F(Broadcast)   \
  F(Send) F(Recv)
#define PITH_NCCL_DECLARE(name) decltype(&nccl##name) name;
  PITH_NCCL_FUNCTIONS(PITH_NCCL_DECLARE)

  Nccl() {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr)
      PITH_FAIL_HINT("./pith setup --cuda installs it", "NCCL cannot be opened: {}", dlerror());
#define PITH_NCCL_LOAD(name)                                                  \
  name = reinterpret_cast<decltype(name)>(dlsym(library, "nccl" #name));      \
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

size_t bytes(const Tensor& tensor) { return tensor.nbytes(); }

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
      c10::cuda::getCurrentCUDAStream(operation.keep.front().device().index()).stream();
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

// Runs `calls` on the group's stream, after what the current stream holds now.
template <class Calls>
void NcclGroup::enqueue(Operation& operation, const Calls& calls) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  const auto ready = record_event(c10::cuda::getCurrentCUDAStream(device_.index()).stream());
  check(cudaStreamWaitEvent(stream, ready.get()));
  check(nccl().GroupStart());
  calls(stream);
  check(nccl().GroupEnd());
  operation.done = record_event(stream);
  watch(operation.what, operation.limit_s, [device = device_.index(), event = operation.done] {
    cudaSetDevice(device);  // else a context on the first GPU would be made
    return cudaEventQuery(event.get()) != cudaErrorNotReady;
  });
}

void NcclGroup::all_reduce(Operation& operation, Tensor& tensor, Reduce op) {
  const Tensor wide = widen(tensor);
  operation.keep = {wide, tensor};
  enqueue(operation, [&](cudaStream_t stream) {
    const ncclRedOp_t nccl_op =
        op == Reduce::sum ? ncclSum : op == Reduce::max ? ncclMax : ncclMin;
    check(nccl().AllReduce(wide.data_ptr(), wide.data_ptr(), static_cast<size_t>(wide.numel()),
                           sum_type(wide), nccl_op, comm_, stream));
  });
  if (!wide.is_same(tensor)) operation.finish = [wide, tensor] { tensor.copy_(wide); };
}

void NcclGroup::all_gather(Operation& operation, Tensor& out, const Tensor& in,
                           std::span<const int64_t> sizes) {
  operation.keep = {out, in};
  enqueue(operation, [&](cudaStream_t stream) {
    if (all_equal(sizes)) {
      check(nccl().AllGather(in.data_ptr(), out.data_ptr(), bytes(in), ncclInt8, comm_, stream));
      return;
    }
    auto* part = static_cast<char*>(out.data_ptr());
    for (int64_t i = 0; i < size_; ++i) {
      const size_t count = static_cast<size_t>(sizes[static_cast<size_t>(i)]) * out.element_size();
      check(nccl().Broadcast(i == rank_ ? in.data_ptr() : part, part, count, ncclInt8,
                             static_cast<int>(i), comm_, stream));
      part += count;
    }
  });
}

void NcclGroup::reduce_scatter(Operation& operation, Tensor& out, const Tensor& in,
                               std::span<const int64_t> sizes) {
  const Tensor wide = widen(in);
  const Tensor sum =
      out.scalar_type() == wide.scalar_type() ? out : at::empty(out.sizes(), wide.options());
  operation.keep = {sum, wide, out};
  enqueue(operation, [&](cudaStream_t stream) {
    const ncclDataType_t type = sum_type(wide);
    if (all_equal(sizes)) {
      check(nccl().ReduceScatter(wide.data_ptr(), sum.data_ptr(), static_cast<size_t>(sizes[0]),
                                 type, ncclSum, comm_, stream));
      return;
    }
    auto* part = static_cast<char*>(wide.data_ptr());
    for (int64_t i = 0; i < size_; ++i) {
      const auto count = static_cast<size_t>(sizes[static_cast<size_t>(i)]);
      check(nccl().Reduce(part, i == rank_ ? sum.data_ptr() : nullptr, count, type, ncclSum,
                          static_cast<int>(i), comm_, stream));
      part += count * wide.element_size();
    }
  });
  if (!sum.is_same(out)) operation.finish = [sum, out] { out.copy_(sum); };
}

void NcclGroup::all_to_all(Operation& operation, Tensor& out, const Tensor& in,
                           std::span<const int64_t> recv_sizes,
                           std::span<const int64_t> send_sizes) {
  operation.keep = {out, in};
  enqueue(operation, [&](cudaStream_t stream) {
    auto* to = static_cast<char*>(out.data_ptr());
    auto* from = static_cast<char*>(in.data_ptr());
    for (int64_t i = 0; i < size_; ++i) {
      const auto peer = static_cast<size_t>(i);
      const size_t send = static_cast<size_t>(send_sizes[peer]) * in.element_size();
      const size_t recv = static_cast<size_t>(recv_sizes[peer]) * in.element_size();
      if (send > 0) check(nccl().Send(from, send, ncclInt8, static_cast<int>(i), comm_, stream));
      if (recv > 0) check(nccl().Recv(to, recv, ncclInt8, static_cast<int>(i), comm_, stream));
      from += send;
      to += recv;
    }
  });
}

void NcclGroup::exchange(Operation& operation, const std::vector<P2P>& messages) {
  for (const P2P& message : messages) operation.keep.push_back(message.tensor);
  enqueue(operation, [&](cudaStream_t stream) {
    for (const auto& [peer, tensor, is_send] : messages) {
      if (tensor.numel() == 0) continue;
      void* data = tensor.data_ptr();
      const auto to = static_cast<int>(peer);
      check(is_send ? nccl().Send(data, bytes(tensor), ncclInt8, to, comm_, stream)
                    : nccl().Recv(data, bytes(tensor), ncclInt8, to, comm_, stream));
    }
  });
}

void NcclGroup::broadcast(Operation& operation, Tensor& tensor, int64_t root) {
  operation.keep = {tensor};
  enqueue(operation, [&](cudaStream_t stream) {
    check(nccl().Broadcast(tensor.data_ptr(), tensor.data_ptr(), bytes(tensor), ncclInt8,
                           static_cast<int>(root), comm_, stream));
  });
}

}  // namespace pith
#endif  // PITH_CUDA
