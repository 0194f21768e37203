// The two transports behind Comm and what they share with the world; for core/*.cpp only.
#pragma once
#include "core/comm.h"

struct ompi_request_t;  // MPI_Request
struct ncclComm;        // *ncclComm_t
struct CUevent_st;      // *cudaEvent_t
struct CUstream_st;     // *cudaStream_t

namespace pith {

// One collective, checked and under way: all_to_all where both `recv` and `send` stand,
// all_gather without `send`, reduce_scatter without `recv`, all_reduce without both.
struct Operation {
  const char* name = "";
  Tensor out = {}, in = {};        // the same tensor where it works in place
  std::vector<int64_t> recv = {};  // elements of `out` from each member; empty: all are summed
  std::vector<int64_t> send = {};  // elements of `in` to each member; empty: all of it to each
  std::string what = {};           // for a person: operation, tensor, group, step
  double limit_s = 0;

  std::vector<ompi_request_t*> requests = {};
  std::shared_ptr<CUevent_st> done = {};
  std::function<void()> finish = {};  // last sums and conversions, run by wait(); keeps tensors
};

// The address of a function or variable of a library that is opened when it is needed.
struct Symbol {
  void* address;
  template <class T> operator T*() const { return reinterpret_cast<T*>(address); }
};
Symbol find_symbol(const char* library, const char* name);

// Starts MPI; throws when its library or the launcher's environment is unusable.
void mpi_start();
void mpi_finish();
std::string mpi_broadcast_text(const std::string& text);  // from rank 0 of all
// Starts messages between these world ranks, of which this process is the rank-th. No other group
// with the same members has this tag.
void mpi_send(Operation& operation, const std::vector<int64_t>& ranks, int64_t rank, int tag);
// Completes the requests; sleeps between tries, so that oversubscribed cores serve other ranks.
void mpi_wait(Operation& operation);

#if PITH_CUDA
struct NcclLink {
  ncclComm* comm;
  CUstream_st* stream;  // of its own, so that groups overlap with compute and each other
};
std::string nccl_new_id();  // by one member for all
NcclLink nccl_connect(const std::string& id, int64_t rank, int64_t size, at::Device device);
void nccl_send(Operation& operation, const NcclLink& link);
void nccl_wait(Operation& operation);  // the current stream waits
#endif

// The job ends with a message when `done` has not become true after limit_s seconds, or with the
// error that it throws. The heartbeat asks it under a lock: it must not call what is below.
void watch(std::string what, double limit_s, std::function<bool()> done);

// The same for a host call that may block: it is done when the result is gone.
[[nodiscard]] std::shared_ptr<void> watch(std::string what, double limit_s);

// The texts of all members, in order, through the job's store; waits for them. One round each.
std::vector<std::string> store_gather(
    const std::string& place, int64_t round, int64_t rank, int64_t size, const std::string& mine);

std::string comm_context();                    // "" or ", step 12"
void note_operation(const std::string& what);  // what the heartbeat tells about this rank
double comm_timeout_s();

}
