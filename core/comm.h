// Process groups and their collectives: MPI for CPU tensors, NCCL for CUDA tensors. World: the job.
#pragma once
#include "core/tensor.h"

namespace pith {
// How this process was started: alone, by mpirun or srun (MPI), or by torchrun.
struct Launch {
  int64_t rank = 0, size = 1, local_rank = 0; // local: among the processes of this machine
  bool mpi = false;
};
// Reads the environment only. Throws where several processes cannot meet.
const Launch& launch_info();

struct Operation; // core/transport.h

// A collective under way: its tensors may be read, written or dropped after wait() only. There the
// host waits (CPU) or the current stream, that of the tensors (CUDA). Waiting twice is harmless;
// the destructor waits unless an exception unwinds.
class Work {
 public:
  Work() = default;
  explicit Work(Operation* operation) : operation_(operation) {}
  void wait();
 private:
  struct Drop {
    void operator()(Operation* operation) const;
  };
  unique_ptr<Operation, Drop> operation_; // null: done
};

// A group of processes; a cheap handle. All members enter its collectives in one order, also with
// empty tensors. Tensors are contiguous, on one device, which chooses the transport (set up at
// first use). In a group of one a collective is the identity. Own sizes are checked, not the
// others'. Floating-point sums are formed in FP32 (FP64 for FP64), rounded once: on CPUs in the
// order of ranks, with NCCL in one that group, hardware and size decide. A collective longer than
// PITH_COMM_TIMEOUT_S seconds (600; a group's first: three times that) ends the job by name.
class Comm {
 public:
  Comm(); // this process alone

  int64_t size() const;
  int64_t rank() const;
  const vector<int64_t>& ranks() const; // world ranks, ascending
  const string& name() const;

  // The sum, in place. float64, float32, bfloat16, int64, int32.
  [[nodiscard]] Work all_reduce_async(Tensor& tensor) const;
  // `in` of member i becomes part i of `out`, equal parts of it seen flat, or is that part itself.
  [[nodiscard]] Work all_gather_async(Tensor& out, const Tensor& in) const;
  // Part i of `in`, summed over members, becomes `out` of member i. float64, float32, bfloat16,
  // also from bfloat16 `in` to float32 `out`.
  [[nodiscard]] Work reduce_scatter_async(Tensor& out, const Tensor& in) const;
  // Rows of dim 0: send_splits[i] rows of `in` go to member i, recv_splits[i] rows of `out` come
  // from it, in order. Any may be zero. On CUDA this holds the group's stream until its partners
  // have called theirs: never start to receive what its sender sends by a later call in this group.
  [[nodiscard]] Work all_to_all_async(Tensor& out, const Tensor& in,
    span<const int64_t> recv_splits, span<const int64_t> send_splits) const;

  void all_reduce(Tensor& tensor) const { all_reduce_async(tensor).wait(); }

  // Small host data through the job's store, about a millisecond each; collective.
  vector<string> all_gather_strings(const string& mine) const;
  void barrier() const { all_gather_strings(""); } // of the hosts, not their streams

  struct Impl;
 private:
  friend class World;
  explicit Comm(shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Work start(Operation&& operation) const;

  shared_ptr<Impl> impl_;
};

// The processes of the job, made once by a command before any group. One alone starts nothing.
// Else: MPI (mpirun, srun --mpi=pmix) or LibTorch's TCPStore at MASTER_ADDR (torchrun), a store on
// rank 0, and a heartbeat: after PITH_HEARTBEAT_S seconds (20) without one all end.
class World {
 public:
  World(); // collective
  ~World(); // waits for all ranks, unless an exception unwinds
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int64_t size() const { return launch_info().size; }
  int64_t rank() const { return launch_info().rank; }
  Comm all() const;
  // A group of these world ranks (ascending). Its members alone call it, in one order.
  Comm group(vector<int64_t> ranks, const string& name) const;
};

// Of several processes: makes `text` the first cause unless there is one, prints it once, ends all
// with status 1. In a job of one: returns.
void end_all_ranks(const string& text);

// Where the program stands ("step 12"), for messages about hangs and dead ranks.
void set_comm_context(const string& context);

// Throws on every member where a text differs, naming item, ranks and first different line.
void check_same_everywhere(const Comm& comm, const vector<pair<string, string>>& items);
}
