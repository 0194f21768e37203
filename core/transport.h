// The two transports behind Comm; for core/*.cpp only.
#pragma once
#include "core/comm.h"

struct ompi_request_t; // MPI_Request
struct ncclComm; // *ncclComm_t
struct CUevent_st; // *cudaEvent_t
struct CUstream_st; // *cudaStream_t

namespace pith {
// One collective, checked and under way. Without `send`: all_gather; without `recv`:
// reduce_scatter; without both: all_reduce; else all_to_all.
struct Operation {
  const char* name = "";
  Tensor out = {}, in = {}; // the same tensor in place
  vector<int64_t> recv = {}; // elements of `out` from each member; empty: summed
  vector<int64_t> send = {}; // elements of `in` to each member; empty: all to each
  string what = {}; // for a person: operation, tensor, group, step
  double limit_s = 0;

  vector<ompi_request_t*> requests = {};
  shared_ptr<CUevent_st> done = {};
  function<void()> finish = {}; // last sums and conversions, by wait(); keeps tensors
};

// A function or variable of a library opened when it is needed.
struct Symbol {
  void* address;
  template <class T> operator T*() const { return reinterpret_cast<T*>(address); }
};
Symbol find_symbol(const char* library, const char* name);

void mpi_start(); // throws when its library or the launcher's environment is unusable
void mpi_finish();
string mpi_broadcast_text(const string& text); // from rank 0 of all
// Starts messages between these ranks, this the rank-th. `tag`: no other group of them has it.
void mpi_send(Operation& operation, const vector<int64_t>& ranks, int64_t rank, int tag);
// Completes the requests; sleeps between tries: oversubscribed cores serve other ranks.
void mpi_wait(Operation& operation);

#if PITH_CUDA
struct NcclLink {
  ncclComm* comm;
  CUstream_st* stream; // of its own, so that groups overlap with compute and each other
};
string nccl_new_id(); // by one member for all
NcclLink nccl_connect(const string& id, int64_t rank, int64_t size, Device device);
void nccl_send(Operation& operation, const NcclLink& link);
void nccl_wait(Operation& operation); // the current stream waits
#endif

// Ends the job when `done` is not true after limit_s seconds, or with the error it throws. The
// heartbeat asks it under a lock: it must not call what is below.
void watch(string what, double limit_s, function<bool()> done);

// The same for a host call that may block, until the result is gone.
[[nodiscard]] shared_ptr<void> watch(string what, double limit_s);

// The texts of all members, in order, through the store. One round each.
vector<string> store_gather(
  const string& place, int64_t round, int64_t rank, int64_t size, const string& mine);

string comm_context(); // "" or ", step 12"
void note_operation(const string& what); // the heartbeat tells it
double comm_timeout_s();
}
