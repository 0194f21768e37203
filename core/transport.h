// The two transports behind Comm and what they share with the world; for core/*.cpp only.
#pragma once
#include <deque>
#include <functional>

#include "core/comm.h"

struct ompi_communicator_t;  // MPI_Comm
struct ompi_request_t;       // MPI_Request
struct ncclComm;             // *ncclComm_t
struct CUevent_st;           // *cudaEvent_t

namespace pith {

// One collective under way.
struct Operation {
  std::string what;  // for a person: operation, tensor, group, step
  double limit_s = 0;
  std::vector<Tensor> keep;
  std::vector<ompi_request_t*> requests;
  std::deque<std::vector<int>> counts;
  std::shared_ptr<CUevent_st> done;
  std::function<void()> finish;  // last sums and conversions, run by wait()
};

// Starts MPI; throws when its library or the launcher's environment is unusable.
void mpi_start(int64_t rank);
void mpi_finish();
std::string mpi_broadcast_text(const std::string& text);  // from rank 0 of all
// Completes the requests; sleeps between tries, so that oversubscribed cores serve other ranks.
void mpi_wait(Operation& operation);

// Sizes are elements; parts lie one after the other.
class MpiGroup {
 public:
  explicit MpiGroup(const std::vector<int64_t>& ranks);
  void all_reduce(Operation& operation, Tensor& tensor, Reduce op);
  void all_gather(Operation& operation, Tensor& out, const Tensor& in,
                  std::span<const int64_t> sizes);
  void reduce_scatter(Operation& operation, Tensor& out, const Tensor& in,
                      std::span<const int64_t> sizes);
  void all_to_all(Operation& operation, Tensor& out, const Tensor& in,
                  std::span<const int64_t> recv_sizes, std::span<const int64_t> send_sizes);
  void exchange(Operation& operation, const std::vector<P2P>& messages);
  void broadcast(Operation& operation, Tensor& tensor, int64_t root);

 private:
  ompi_communicator_t* comm_ = nullptr;
  int64_t size_, rank_ = 0;
};

#if PITH_CUDA
// The current stream waits for the operation.
void nccl_wait(Operation& operation);

class NcclGroup {
 public:
  // `share` carries the group's id from its first member to the others.
  NcclGroup(int64_t size, int64_t rank, at::Device device,
            const std::function<std::string(const std::string&)>& share);
  void all_reduce(Operation& operation, Tensor& tensor, Reduce op);
  void all_gather(Operation& operation, Tensor& out, const Tensor& in,
                  std::span<const int64_t> sizes);
  void reduce_scatter(Operation& operation, Tensor& out, const Tensor& in,
                      std::span<const int64_t> sizes);
  void all_to_all(Operation& operation, Tensor& out, const Tensor& in,
                  std::span<const int64_t> recv_sizes, std::span<const int64_t> send_sizes);
  void exchange(Operation& operation, const std::vector<P2P>& messages);
  void broadcast(Operation& operation, Tensor& tensor, int64_t root);

 private:
  template <class Calls>
  void enqueue(Operation& operation, const Calls& calls);

  ncclComm* comm_ = nullptr;
  int64_t size_, rank_;
  at::Device device_;
  void* stream_;  // cudaStream_t of its own, so that groups overlap with compute and each other
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
