// NCCL, opened at run time beside libtorch_cuda.
#include "core/transport.h"

#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace pith {
namespace {
// NCCL 2's functions and numbers, declared here: the build needs nothing of it.
struct UniqueId {
  char bytes[128];
};
enum class Type : int { i8 = 0, i32 = 2, i64 = 4, f32 = 7, f64 = 8 };
enum Op : int { kSum = 0 };
constexpr int kSuccess = 0, kInProgress = 7;

struct Nccl {
  using Comm = ncclComm*;
  static Symbol find(const char* name) { return find_symbol("libnccl.so.2", name); }
  int (*get_unique_id)(UniqueId*) = find("ncclGetUniqueId");
  int (*init)(Comm*, int size, UniqueId, int rank) = find("ncclCommInitRank");
  int (*async_error)(Comm, int*) = find("ncclCommGetAsyncError");
  const char* (*error_string)(int) = find("ncclGetErrorString");
  const char* (*last_error)(Comm) = find("ncclGetLastError");
  int (*group_start)() = find("ncclGroupStart");
  int (*group_end)() = find("ncclGroupEnd");
  int (*all_reduce)(const void* from, void* to, size_t, Type, Op, Comm, cudaStream_t) = find(
    "ncclAllReduce");
  int (*all_gather)(const void*, void*, size_t, Type, Comm, cudaStream_t) = find("ncclAllGather");
  int (*reduce_scatter)(const void*, void*, size_t, Type, Op, Comm, cudaStream_t) = find(
    "ncclReduceScatter");
  int (*send)(const void*, size_t, Type, int peer, Comm, cudaStream_t) = find("ncclSend");
  int (*recv)(void*, size_t, Type, int peer, Comm, cudaStream_t) = find("ncclRecv");
};

const Nccl& nccl() {
  static const Nccl table;
  return table;
}

void check(int code) {
  PITH_CHECK(
    code == kSuccess, "NCCL: {}: {}", nccl().error_string(code), nccl().last_error(nullptr));
}

void check(cudaError_t code) {
  PITH_CHECK(code == cudaSuccess, "CUDA: {}", cudaGetErrorString(code));
}

shared_ptr<CUevent_st> record_event(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  shared_ptr<CUevent_st> owner(event, [](cudaEvent_t e) { cudaEventDestroy(e); });
  check(cudaEventRecord(event, stream));
  return owner;
}

Type sum_type(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == kDouble ? Type::f64
    : type == kLong      ? Type::i64
    : type == kInt       ? Type::i32
                         : Type::f32;
}
}

void nccl_wait(Operation& operation) {
  const cudaStream_t current =
    c10::cuda::getCurrentCUDAStream(operation.in.device().index()).stream();
  check(cudaStreamWaitEvent(current, operation.done.get()));
}

string nccl_new_id() {
  UniqueId id{};
  check(nccl().get_unique_id(&id));
  return {id.bytes, sizeof(id)};
}

NcclLink nccl_connect(const string& id, int64_t rank, int64_t size, Device device) {
  UniqueId copy{};
  PITH_CHECK(id.size() == sizeof(copy), "the group's NCCL id arrived damaged");
  std::memcpy(copy.bytes, id.data(), sizeof(copy));
  ncclComm* comm = nullptr;
  check(cudaSetDevice(device.index()));
  check(nccl().init(&comm, narrow<int>(size), copy, narrow<int>(rank)));
  watch("NCCL", numeric_limits<double>::infinity(), [comm] {
    int state = kSuccess;
    if (nccl().async_error(comm, &state) == kSuccess && state != kInProgress) check(state);
    return false;
  });
  return {comm, c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index()).stream()};
}

// Bytes travel, except where they are summed.
void nccl_send(Operation& operation, const NcclLink& link) {
  const auto& [comm, stream] = link;
  Tensor out = operation.out, in = operation.in;
  if (operation.recv.empty()) { // sums, not of BF16
    if (in.scalar_type() == kBFloat16) in = in.to(kFloat);
    if (operation.send.empty()) out = in;
    else if (out.scalar_type() != in.scalar_type()) out = at::empty(out.sizes(), in.options());
  }
  const auto device = in.device().index(); // after what its current stream holds now
  const auto ready = record_event(c10::cuda::getCurrentCUDAStream(device).stream());
  check(cudaStreamWaitEvent(stream, ready.get()));
  check(nccl().group_start());
  auto* to = static_cast<char*>(out.data_ptr());
  auto* from = static_cast<char*>(in.data_ptr());
  const size_t width = in.element_size();
  const vector<int64_t>&recv = operation.recv, &send = operation.send;
  if (recv.empty() && send.empty()) {
    check(nccl().all_reduce(from, to, in.numel(), sum_type(in), kSum, comm, stream));
  } else if (send.empty()) {
    check(nccl().all_gather(from, to, in.nbytes(), Type::i8, comm, stream));
  } else if (recv.empty()) {
    check(nccl().reduce_scatter(from, to, out.numel(), sum_type(in), kSum, comm, stream));
  } else {
    for (size_t i = 0; i < send.size(); ++i) {
      const size_t sent = index(send[i]) * width, received = index(recv[i]) * width;
      const int peer = int(i);
      if (sent > 0) check(nccl().send(from, sent, Type::i8, peer, comm, stream));
      if (received > 0) check(nccl().recv(to, received, Type::i8, peer, comm, stream));
      from += sent;
      to += received;
    }
  }
  check(nccl().group_end());
  operation.done = record_event(stream);
  operation.finish = [out, in, to = operation.out] {
    if (!out.is_same(to)) to.copy_(out);
  };
  watch(operation.what, operation.limit_s, [device, event = operation.done] {
    cudaSetDevice(device); // else a context on the first GPU would be made
    return cudaEventQuery(event.get()) != cudaErrorNotReady;
  });
}
}
#endif // PITH_CUDA
