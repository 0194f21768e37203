// MPI, opened at run time: a program started plainly does not need it. Provides mpi_*, MpiGroup.
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "core/transport.h"

namespace pith {
namespace {

// The functions and handles in use, under their names in Open MPI 5.
struct Mpi {
#define PITH_MPI_FUNCTIONS(F)                                                                     \
  F(Init_thread)                                                                                  \
  F(Finalize)                                                                                     \
  F(Bcast)                                                                                        \
  F(Comm_group) F(Group_incl) F(Group_free) F(Comm_create_group) F(Comm_rank) F(Comm_size)        \
      F(Comm_set_errhandler) F(Error_string) F(Iallgatherv) F(Ialltoallv) F(Iallreduce) F(Ibcast) \
          F(Isend) F(Irecv) F(Testall) F(Type_contiguous) F(Type_commit) F(Type_free)
#define PITH_MPI_DECLARE(name) decltype(&MPI_##name) name;
  PITH_MPI_FUNCTIONS(PITH_MPI_DECLARE)
  MPI_Comm world;
  MPI_Errhandler errors_return;
  MPI_Datatype byte, float32, float64, int32, int64;
  MPI_Op sum, max, min;

  Mpi() {
    void* library = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      PITH_FAIL_HINT("./pith setup puts Open MPI 5 into .deps/; LD_LIBRARY_PATH is searched first",
                     "MPI cannot be opened: {}", dlerror());
    }
    const auto find = [&](const std::string& name) {
      void* symbol = dlsym(library, name.c_str());
      PITH_CHECK(symbol != nullptr, "libmpi.so.40 has no {}: not Open MPI 5", name);
      return symbol;
    };
#define PITH_MPI_LOAD(name) name = reinterpret_cast<decltype(name)>(find("MPI_" #name));
    PITH_MPI_FUNCTIONS(PITH_MPI_LOAD)
    world = static_cast<MPI_Comm>(find("ompi_mpi_comm_world"));
    errors_return = static_cast<MPI_Errhandler>(find("ompi_mpi_errors_return"));
    byte = static_cast<MPI_Datatype>(find("ompi_mpi_byte"));
    float32 = static_cast<MPI_Datatype>(find("ompi_mpi_float"));
    float64 = static_cast<MPI_Datatype>(find("ompi_mpi_double"));
    int32 = static_cast<MPI_Datatype>(find("ompi_mpi_int32_t"));
    int64 = static_cast<MPI_Datatype>(find("ompi_mpi_int64_t"));
    sum = static_cast<MPI_Op>(find("ompi_mpi_op_sum"));
    max = static_cast<MPI_Op>(find("ompi_mpi_op_max"));
    min = static_cast<MPI_Op>(find("ompi_mpi_op_min"));
    Dl_info info;  // the wheel's library was moved: tell it where its plug-ins are
    if (dladdr(reinterpret_cast<void*>(Init_thread), &info) != 0) {
      const std::string folder(info.dli_fname, std::string_view(info.dli_fname).rfind('/'));
      if (access((folder + "/openmpi/libpmix.so.2").c_str(), R_OK) == 0)
        setenv("OPAL_PREFIX", (folder + "/..").c_str(), /*overwrite=*/0);
    }
  }
};

const Mpi& mpi() {
  static const Mpi table;
  return table;
}

void check(int code, const char* call) {
  if (code == 0) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  mpi().Error_string(code, text, &length);
  PITH_FAIL("MPI_{} failed: {}", call, text);
}

MPI_Request* request(Operation& operation) { return &operation.requests.emplace_back(); }

const int* keep(Operation& operation, std::vector<int> counts) {
  return operation.counts.emplace_back(std::move(counts)).data();
}

// MPI counts in int: bytes in units of the largest common power of two where there are many.
class Counts {
 public:
  // `sizes` in elements of `bytes` bytes each.
  Counts(std::span<const int64_t> sizes, size_t bytes)
      : type_(mpi().byte), width_(static_cast<int64_t>(bytes)) {
    int64_t total = 0, common = 1 << 20;
    for (const int64_t size : sizes) {
      total += size * width_;
      common = std::gcd(common, size * width_);
    }
    constexpr int64_t kLimit = std::numeric_limits<int>::max();
    if (total <= kLimit) return;
    unit_ = common;
    PITH_CHECK(total / unit_ <= kLimit,
               "{} bytes in parts with the common factor {} are too much for MPI: cut them", total,
               unit_);
    check(mpi().Type_contiguous(static_cast<int>(unit_), mpi().byte, &type_), "Type_contiguous");
    check(mpi().Type_commit(&type_), "Type_commit");
  }
  Counts(const Counts&) = delete;
  Counts& operator=(const Counts&) = delete;
  ~Counts() {  // calls under way keep the type
    if (unit_ > 1) mpi().Type_free(&type_);
  }

  MPI_Datatype type() const { return type_; }
  int operator()(int64_t size) const { return static_cast<int>(size * width_ / unit_); }
  std::vector<int> operator()(std::span<const int64_t> sizes) const {
    std::vector<int> counts;
    for (const int64_t size : sizes) counts.push_back((*this)(size));
    return counts;
  }
  static std::vector<int> starts(const std::vector<int>& counts) {
    std::vector<int> result(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), result.begin(), 0);
    return result;
  }

 private:
  MPI_Datatype type_;
  int64_t width_, unit_ = 1;
};

Tensor sum_type(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

// The sum of (n, size) over n, in that order, in FP32 or FP64.
Tensor sum_in_order(const Tensor& parts) {
  Tensor sum = sum_type(parts[0]);
  for (int64_t i = 1; i < parts.size(0); ++i) sum.add_(parts[i]);
  return sum;
}

}  // namespace

void mpi_start() {
  int level = 0, got = -1, size = 0;
  check(mpi().Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "Init_thread");
  PITH_CHECK(level == MPI_THREAD_MULTIPLE, "this MPI serves one thread only");
  check(mpi().Comm_set_errhandler(mpi().world, mpi().errors_return), "Comm_set_errhandler");
  check(mpi().Comm_rank(mpi().world, &got), "Comm_rank");
  check(mpi().Comm_size(mpi().world, &size), "Comm_size");
  const Launch& launch = launch_info();
  if (got != launch.rank || size != launch.size) {
    PITH_FAIL_HINT("start with the mpirun of .deps/bin (pithtrain launch) or srun --mpi=pmix",
                   "MPI says rank {} of {}, the launcher's environment rank {} of {}", got, size,
                   launch.rank, launch.size);
  }
}

void mpi_finish() { mpi().Finalize(); }

std::string mpi_broadcast_text(const std::string& text) {
  std::vector<char> buffer(1024);
  PITH_CHECK(text.size() < buffer.size(), "text too long");
  std::ranges::copy(text, buffer.begin());
  check(mpi().Bcast(buffer.data(), static_cast<int>(buffer.size()), mpi().byte, 0, mpi().world),
        "Bcast");
  return buffer.data();
}

void mpi_wait(Operation& operation) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::optional<Watched> watched;
  for (int64_t tries = 0;; ++tries) {
    int done = 0;
    check(mpi().Testall(static_cast<int>(operation.requests.size()), operation.requests.data(),
                        &done, MPI_STATUSES_IGNORE),
          "Testall");
    if (done != 0) return;
    if (tries < 100) continue;
    const auto waited = Clock::now() - start;
    if (waited < std::chrono::milliseconds(2)) {
      std::this_thread::yield();
      continue;
    }
    if (!watched) watched.emplace(operation.what, operation.limit_s);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

MpiGroup::MpiGroup(const std::vector<int64_t>& ranks) : size_(std::ssize(ranks)) {
  const std::vector<int> members(ranks.begin(), ranks.end());
  MPI_Group all = nullptr, group = nullptr;
  check(mpi().Comm_group(mpi().world, &all), "Comm_group");
  check(mpi().Group_incl(all, static_cast<int>(size_), members.data(), &group), "Group_incl");
  check(mpi().Comm_create_group(mpi().world, group, 0, &comm_), "Comm_create_group");
  check(mpi().Comm_set_errhandler(comm_, mpi().errors_return), "Comm_set_errhandler");
  mpi().Group_free(&group);
  mpi().Group_free(&all);
  int rank = 0;
  check(mpi().Comm_rank(comm_, &rank), "Comm_rank");
  rank_ = rank;
}

// `in` of every member to every member; in place where `in` is this member's part of `out`.
void MpiGroup::gather(Operation& operation, const Tensor& out, std::span<const int64_t> sizes) {
  const Tensor& in = operation.in;
  const Counts count(sizes, in.element_size());
  const int* counts = keep(operation, count(sizes));
  const int* starts = keep(operation, Counts::starts(operation.counts.back()));
  const int64_t before = std::reduce(sizes.begin(), sizes.begin() + rank_);
  const bool in_place =
      in.data_ptr() == static_cast<char*>(out.data_ptr()) + before * out.element_size();
  check(mpi().Iallgatherv(in_place ? MPI_IN_PLACE : in.data_ptr(), counts[rank_], count.type(),
                          out.data_ptr(), counts, starts, count.type(), comm_, request(operation)),
        "Iallgatherv");
}

// Part i of `in` to member i. Each side counts in a unit of its own: signatures match in bytes.
void MpiGroup::scatter(Operation& operation, const Tensor& out, std::span<const int64_t> recv) {
  const Counts in_count(operation.send, out.element_size()), out_count(recv, out.element_size());
  const int* sends = keep(operation, in_count(operation.send));
  const int* send_starts = keep(operation, Counts::starts(operation.counts.back()));
  const int* recvs = keep(operation, out_count(recv));
  const int* recv_starts = keep(operation, Counts::starts(operation.counts.back()));
  check(
      mpi().Ialltoallv(operation.in.data_ptr(), sends, send_starts, in_count.type(), out.data_ptr(),
                       recvs, recv_starts, out_count.type(), comm_, request(operation)),
      "Ialltoallv");
}

void MpiGroup::start(Operation& operation) {
  const Tensor &out = operation.out, &in = operation.in;
  const bool floating = at::isFloatingType(in.scalar_type());
  switch (operation.kind) {
    case Kind::all_gather:
      return gather(operation, out, operation.recv);
    case Kind::all_to_all:
      return scatter(operation, out, operation.recv);
    case Kind::reduce_scatter: {
      const Tensor parts = at::empty({size_, out.numel()}, in.options());
      scatter(operation, parts, std::vector(static_cast<size_t>(size_), out.numel()));
      operation.finish = [parts, out] { out.copy_(sum_in_order(parts).view(out.sizes())); };
      return;
    }
    case Kind::all_reduce: {
      if (floating && operation.reduce == Reduce::sum) {
        const Tensor parts = at::empty({size_, in.numel()}, in.options());
        gather(operation, parts, std::vector(static_cast<size_t>(size_), in.numel()));
        operation.finish = [parts, out] { out.copy_(sum_in_order(parts).view(out.sizes())); };
        return;
      }
      const Tensor wide = floating ? sum_type(in) : in;
      const auto dtype = wide.scalar_type();
      const MPI_Datatype type = dtype == at::kFloat    ? mpi().float32
                                : dtype == at::kDouble ? mpi().float64
                                : dtype == at::kLong   ? mpi().int64
                                                       : mpi().int32;
      const MPI_Op op = operation.reduce == Reduce::sum   ? mpi().sum
                        : operation.reduce == Reduce::max ? mpi().max
                                                          : mpi().min;
      constexpr int64_t kMost = 1 << 30;
      for (int64_t first = 0; first < wide.numel(); first += kMost) {
        const auto count = static_cast<int>(std::min(kMost, wide.numel() - first));
        auto* data = static_cast<char*>(wide.data_ptr()) + first * wide.element_size();
        check(mpi().Iallreduce(MPI_IN_PLACE, data, count, type, op, comm_, request(operation)),
              "Iallreduce");
      }
      operation.finish = [wide, out] {
        if (!wide.is_same(out)) out.copy_(wide);
      };
      return;
    }
    case Kind::exchange:
      for (const auto& [peer, tensor, is_send] : operation.messages) {
        const int64_t size = tensor.numel();
        const Counts count(std::span(&size, 1), tensor.element_size());
        const int to = narrow<int>(peer), n = count(size);
        void* data = tensor.data_ptr();
        check(is_send ? mpi().Isend(data, n, count.type(), to, 0, comm_, request(operation))
                      : mpi().Irecv(data, n, count.type(), to, 0, comm_, request(operation)),
              is_send ? "Isend" : "Irecv");
      }
      return;
    case Kind::broadcast:
      const int64_t size = in.numel();
      const Counts count(std::span(&size, 1), in.element_size());
      check(mpi().Ibcast(in.data_ptr(), count(size), count.type(), narrow<int>(operation.root),
                         comm_, request(operation)),
            "Ibcast");
  }
}

}  // namespace pith
