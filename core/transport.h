// The two transports behind Comm and what they share with the world; for core/*.cpp only.
#pragma once
#include <deque>
#include <functional>

#include "core/comm.h"

struct ompi_communicator_t;  // MPI_Comm
struct ompi_request_t;       // MPI_Request
struct ncclComm;             // *ncclComm_t
struct CUevent_st;           // *cudaEvent_t
struct CUstream_st;          // *cudaStream_t

namespace pith {

enum class Kind { all_reduce, all_gather, reduce_scatter, all_to_all, exchange, broadcast };

// One collective, checked and under way.
struct Operation {
  Kind kind = Kind::all_reduce;
  Tensor out = {}, in = {};                   // the same tensor where it works in place
  std::vector<int64_t> recv = {}, send = {};  // elements from and to each member, where they matter
  Reduce reduce = Reduce::sum;
  int64_t root = 0;
  std::vector<P2P> messages = {};
  std::string what = {};  // for a person: operation, tensor, group, step
  double limit_s = 0;

  std::vector<ompi_request_t*> requests = {};
  std::deque<std::vector<int>> counts = {};  // MPI reads them until the end
  std::shared_ptr<CUevent_st> done = {};
  std::function<void()> finish = {};  // last sums and conversions, run by wait(); keeps tensors
};

// Starts MPI; throws when its library or the launcher's environment is unusable.
void mpi_start();
void mpi_finish();
std::string mpi_broadcast_text(const std::string& text);  // from rank 0 of all
// Completes the requests; sleeps between tries, so that oversubscribed cores serve other ranks.
void mpi_wait(Operation& operation);

class MpiGroup {
 public:
  explicit MpiGroup(const std::vector<int64_t>& ranks);
  void start(Operation& operation);

 private:
  void gather(Operation& operation, const Tensor& out, std::span<const int64_t> sizes);
  void scatter(Operation& operation, const Tensor& out, std::span<const int64_t> recv);

  ompi_communicator_t* comm_ = nullptr;
  int64_t size_, rank_ = 0;
};

#if PITH_CUDA
void nccl_wait(Operation& operation);  // the current stream waits

class NcclGroup {
 public:
  // `share` carries the group's id from its first member to the others.
  NcclGroup(int64_t size, int64_t rank, at::Device device,
            const std::function<std::string(const std::string&)>& share);
  void start(Operation& operation);

 private:
  void call(const Operation& operation, const Tensor& out, const Tensor& in);

  ncclComm* comm_ = nullptr;
  int64_t size_, rank_;
  at::Device device_;
  CUstream_st* stream_;  // of its own, so that groups overlap with compute and each other
};
#endif

// The job ends with a message when `done` has not become true after limit_s seconds; `done` is
// asked by the watchdog thread. Empty `done`: until unwatch().
uint64_t watch(std::string what, double limit_s, std::function<bool()> done);
void unwatch(uint64_t id);

struct Watched {  // a host call that may block
  Watched(std::string what, double limit_s) : id(watch(std::move(what), limit_s, {})) {}
  ~Watched() { unwatch(id); }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  uint64_t id;
};

// The store of the job. The keys of one group and round are written once by each member.
void store_set(const std::string& key, const std::string& value);
std::vector<std::string> store_get(const std::vector<std::string>& keys);  // waits for them
void store_delete(const std::string& key);

std::string comm_context();
void note_operation(const std::string& what);  // what the heartbeat tells about this rank
double comm_timeout_s();

}  // namespace pith
