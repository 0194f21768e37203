// MPI, opened at run time: a plain start needs none. Its messages make the collectives.
#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>
#include "core/transport.h"

namespace pith {
Symbol find_symbol(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  void* address = handle == nullptr ? nullptr : dlsym(handle, name);
  if (address == nullptr)
    PITH_FAIL_HINT(
      "./pith setup [--cuda] puts the right one into .deps/; LD_LIBRARY_PATH is searched first",
      "{} cannot be used: {}", library, dlerror());
  return {address};
}

namespace {
// The functions and handles in use, under their names in Open MPI 5.
struct Mpi {
  static Symbol find(const char* name) { return find_symbol("libmpi.so.40", name); }
  decltype(&MPI_Init_thread) init = find("MPI_Init_thread");
  decltype(&MPI_Finalize) finalize = find("MPI_Finalize");
  decltype(&MPI_Comm_set_errhandler) set_handler = find("MPI_Comm_set_errhandler");
  decltype(&MPI_Error_string) error_string = find("MPI_Error_string");
  decltype(&MPI_Comm_rank) comm_rank = find("MPI_Comm_rank");
  decltype(&MPI_Comm_size) comm_size = find("MPI_Comm_size");
  decltype(&MPI_Bcast) bcast = find("MPI_Bcast");
  decltype(&MPI_Isend) isend = find("MPI_Isend");
  decltype(&MPI_Irecv) irecv = find("MPI_Irecv");
  decltype(&MPI_Testall) test_all = find("MPI_Testall");
  MPI_Comm world = find("ompi_mpi_comm_world");
  MPI_Errhandler errors_return = find("ompi_mpi_errors_return");
  MPI_Datatype byte = find("ompi_mpi_byte");
};

const Mpi& mpi() {
  static const Mpi table;
  return table;
}

void check(int code) {
  if (code == 0) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  mpi().error_string(code, text, &length);
  PITH_FAIL("MPI: {}", text);
}

// The parts (n, size) summed over n, in that order; BF16 in FP32.
Tensor sum_in_order(const Tensor& parts) {
  Tensor sum = parts.scalar_type() == kBFloat16 ? parts[0].to(kFloat) : parts[0];
  for (int64_t i = 1; i < parts.size(0); ++i) sum.add_(parts[i]);
  return sum;
}
}

void mpi_start() {
  Dl_info info; // the wheel's library was moved: its plug-ins
  if (dladdr(reinterpret_cast<void*>(mpi().init), &info) != 0) {
    const string folder(info.dli_fname, string_view(info.dli_fname).rfind('/'));
    if (access((folder + "/openmpi/libpmix.so.2").c_str(), R_OK) == 0)
      setenv("OPAL_PREFIX", (folder + "/..").c_str(), /*overwrite=*/0);
  }
  int level = 0, rank = -1, size = 0;
  check(mpi().init(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level));
  PITH_CHECK(level == MPI_THREAD_MULTIPLE, "this MPI serves one thread only");
  check(mpi().set_handler(mpi().world, mpi().errors_return));
  check(mpi().comm_rank(mpi().world, &rank));
  check(mpi().comm_size(mpi().world, &size));
  const Launch& launch = launch_info();
  if (rank != launch.rank || size != launch.size)
    PITH_FAIL_HINT("start with the mpirun of .deps/bin (pithtrain launch) or srun --mpi=pmix",
      "MPI says rank {} of {}, the launcher's environment rank {} of {}", rank, size, launch.rank,
      launch.size);
}

void mpi_finish() { mpi().finalize(); }

string mpi_broadcast_text(const string& text) {
  array<char, 1024> buffer{};
  PITH_CHECK(text.size() < buffer.size(), "text too long");
  ranges::copy(text, buffer.begin());
  const auto size = int(buffer.size());
  check(mpi().bcast(buffer.data(), size, mpi().byte, 0, mpi().world));
  return buffer.data();
}

void mpi_send(Operation& operation, const vector<int64_t>& ranks, int64_t rank, int tag) {
  const auto message = [&](int64_t member, void* data, size_t bytes, bool is_send) {
    constexpr size_t kMost = 1 << 30; // MPI counts in int
    const int peer = narrow<int>(ranks[index(member)]);
    for (size_t done = 0; done < bytes; done += kMost) {
      char* from = static_cast<char*>(data) + done;
      const auto count = int(min(kMost, bytes - done));
      MPI_Request* request = &operation.requests.emplace_back();
      if (is_send) check(mpi().isend(from, count, mpi().byte, peer, tag, mpi().world, request));
      else check(mpi().irecv(from, count, mpi().byte, peer, tag, mpi().world, request));
    }
  };
  const Tensor &out = operation.out, &in = operation.in;
  const bool sums = operation.recv.empty();
  const Tensor parts = sums ? at::empty({ssize(ranks), out.numel()}, in.options()) : out;
  auto *to = static_cast<char*>(parts.data_ptr()), *from = static_cast<char*>(in.data_ptr());
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto bytes = [&](const vector<int64_t>& sizes, const Tensor& whole) {
      return index(in.element_size() * (sizes.empty() ? whole.numel() : sizes[i]));
    };
    const size_t recv = bytes(operation.recv, out), send = bytes(operation.send, in);
    const auto member = int64_t(i);
    if (member != rank) {
      message(member, from, send, true);
      message(member, to, recv, false);
    } else if (to != from && recv > 0) { // equal: the gather is in place
      std::memcpy(to, from, recv);
    }
    to += recv;
    if (!operation.send.empty()) from += send;
  }
  if (sums) operation.finish = [parts, out] { out.copy_(sum_in_order(parts).view(out.sizes())); };
}

void mpi_wait(Operation& operation) {
  using Clock = chrono::steady_clock;
  const auto start = Clock::now();
  shared_ptr<void> watched;
  for (int done = 0;;) {
    check(mpi().test_all(
      int(operation.requests.size()), operation.requests.data(), &done, MPI_STATUSES_IGNORE));
    if (done != 0) return;
    if (Clock::now() - start < chrono::milliseconds(2)) {
      std::this_thread::yield();
      continue;
    }
    if (!watched) watched = watch(operation.what, operation.limit_s);
    std::this_thread::sleep_for(chrono::microseconds(50));
  }
}
}
