#include "core/comm.h"
#include <c10/util/accumulate.h>
#include <xxhash.h>
#include "core/transport.h"

namespace pith {
struct Comm::Impl {
  vector<int64_t> ranks;
  int64_t rank;
  string name, key; // key: the group's place in the store
  optional<int> mpi_tag = {};
#if PITH_CUDA
  optional<NcclLink> nccl = {};
#endif
  int64_t operations = 0, rounds = 0; // so far: collectives, gathers of strings

  string describe() const {
    return fmt::format("group {} [{}]{}", name, fmt::join(ranks, ", "), comm_context());
  }
};

namespace {
vector<int64_t> elements(span<const int64_t> splits, int64_t members, const Tensor& tensor) {
  PITH_CHECK(tensor.dim() > 0 && ssize(splits) == members,
    "all_to_all: [{}] rows for {} members do not cut {}", fmt::join(splits, ", "), members,
    describe(tensor, "tensor"));
  vector<int64_t> result;
  for (const int64_t rows: splits)
    result.push_back(rows * c10::multiply_integers(tensor.sizes().slice(1)));
  return result;
}
}

void Work::Drop::operator()(Operation* operation) const {
  // While an exception unwinds its buffers stay: they may still be written.
  if (std::uncaught_exceptions() == 0) Work(operation).wait();
}

void Work::wait() {
  const unique_ptr<Operation> operation(operation_.release());
  if (!operation) return;
#if PITH_CUDA
  if (operation->done) nccl_wait(*operation);
#endif
  if (!operation->requests.empty()) mpi_wait(*operation);
  const NoGradGuard no_grad;
  if (operation->finish) operation->finish();
}

Comm::Comm() {
  static const auto alone = make_shared<Impl>(vector{launch_info().rank}, 0, "self", "");
  impl_ = alone;
}
int64_t Comm::size() const { return ssize(impl_->ranks); }
int64_t Comm::rank() const { return impl_->rank; }
const vector<int64_t>& Comm::ranks() const { return impl_->ranks; }
const string& Comm::name() const { return impl_->name; }

Work Comm::start(Operation&& given) const {
  const Tensor &out = given.out, &in = given.in;
  const auto type = in.scalar_type();
  const auto fail_unless = [&](bool good, const char* why) {
    PITH_CHECK(good, "{} in group {} of {}: {}: {}, {}; elements from members [{}], to [{}]",
      given.name, name(), size(), why, describe(out, "out"), describe(in, "in"),
      fmt::join(given.recv, ", "), fmt::join(given.send, ", "));
  };
  fail_unless(out.is_contiguous() && in.is_contiguous() && out.device() == in.device(),
    "tensors must be contiguous and on one device");
  const auto own = [&](const vector<int64_t>& sizes, const Tensor& tensor, const char* why) {
    if (sizes.empty()) return tensor.numel();
    fail_unless(ssize(sizes) == size() && ranges::min(sizes) >= 0 &&
        reduce(sizes.begin(), sizes.end()) == tensor.numel(),
      why);
    return sizes[index(rank())];
  };
  fail_unless(own(given.recv, out, "the parts do not cut out") ==
      own(given.send, in, "the parts do not cut in"),
    "this member's own part has two sizes");
  if (given.recv.empty()) {
    const bool integer = type == kLong || type == kInt;
    fail_unless(
      type == kFloat || type == kDouble || type == kBFloat16 || (integer && given.send.empty()),
      "this type is not summed");
  } else {
    fail_unless(out.scalar_type() == type, "types differ");
  }
  const NoGradGuard no_grad;
  if (size() == 1) {
    if (out.data_ptr() != in.data_ptr()) out.view(-1).copy_(in.view(-1));
    return {};
  }
  Impl& group = *impl_;
  auto operation = make_unique<Operation>(std::move(given));
  const string count = fmt::format("{} #{}", operation->name, group.operations);
  note_operation(fmt::format("{} of group {}", count, group.name));
  operation->what =
    fmt::format("{} of {} in {}", count, describe(operation->out, "tensor"), group.describe());
  operation->limit_s = comm_timeout_s() * (group.operations++ == 0 ? 3 : 1);
  const auto device = operation->in.device();
  if (device.is_cpu() && launch_info().mpi) {
    if (!group.mpi_tag) {
      const auto watched = watch("setting up MPI for " + operation->what, operation->limit_s);
      static int64_t groups = 0; // another tag for each group of one first member
      const int64_t tag = ++groups * launch_info().size + group.ranks.front();
      group.mpi_tag = std::stoi(all_gather_strings(to_string(narrow<int>(tag))).front());
    }
    mpi_send(*operation, group.ranks, group.rank, *group.mpi_tag);
#if PITH_CUDA
  } else if (device.is_cuda()) {
    if (!group.nccl) {
      const auto watched = watch("setting up NCCL for " + operation->what, operation->limit_s);
      const string id = all_gather_strings(rank() == 0 ? nccl_new_id() : "").front();
      group.nccl = nccl_connect(id, group.rank, size(), device);
    }
    nccl_send(*operation, *group.nccl);
#endif
  } else {
    PITH_FAIL_HINT("start with pithtrain launch or mpirun, or use run.device = \"cuda\"",
      "{}: CPU tensors travel through MPI, which this job was not started with", operation->what);
  }
  return Work(operation.release());
}

Work Comm::all_reduce_async(Tensor& tensor) const {
  return start({.name = "all_reduce", .out = tensor, .in = tensor});
}

Work Comm::all_gather_async(Tensor& out, const Tensor& in) const {
  const vector<int64_t> recv(index(size()), in.numel());
  return start({.name = "all_gather", .out = out, .in = in, .recv = recv});
}

Work Comm::reduce_scatter_async(Tensor& out, const Tensor& in) const {
  const vector<int64_t> send(index(size()), out.numel());
  return start({.name = "reduce_scatter", .out = out, .in = in, .send = send});
}

Work Comm::all_to_all_async(Tensor& out, const Tensor& in, span<const int64_t> recv_splits,
  span<const int64_t> send_splits) const {
  const auto recv = elements(recv_splits, size(), out), send = elements(send_splits, size(), in);
  return start({.name = "all_to_all", .out = out, .in = in, .recv = recv, .send = send});
}

vector<string> Comm::all_gather_strings(const string& mine) const {
  if (size() == 1) return {mine};
  const int64_t round = impl_->rounds++;
  const string count = fmt::format("all_gather_strings #{}", round);
  note_operation(fmt::format("{} of group {}", count, name()));
  const auto watched = watch(
    fmt::format("{} in {}", count, impl_->describe()), comm_timeout_s() * (round == 0 ? 3 : 1));
  return store_gather(impl_->key, round, rank(), size(), mine);
}

Comm World::group(vector<int64_t> ranks, const string& name) const {
  static map<string, int64_t> made; // groups with one name and the same ranks
  const auto hash = XXH3_64bits(ranks.data(), ranks.size() * sizeof(int64_t));
  const string key = fmt::format("group/{}/{:x}", name, hash);
  const int64_t place = ranges::lower_bound(ranks, rank()) - ranks.begin();
  return Comm(
    make_shared<Comm::Impl>(std::move(ranks), place, name, fmt::format("{}/{}", key, made[key]++)));
}

Comm World::all() const {
  vector<int64_t> ranks(index(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group(std::move(ranks), "world");
}

void check_same_everywhere(const Comm& comm, const vector<pair<string, string>>& items) {
  for (const auto& [name, text]: items) {
    std::istringstream first(comm.all_gather_strings(comm.rank() == 0 ? text : "").front());
    std::istringstream mine(text);
    string a, b, difference;
    for (int64_t line = 1; difference.empty() && (first || mine); ++line) {
      if (!getline(first, a)) a.clear();
      if (!getline(mine, b)) b.clear();
      if (a != b) difference = fmt::format("line {}: '{}' and '{}'", line, a, b);
    }
    vector<int64_t> others;
    const vector<string> all = comm.all_gather_strings(difference);
    for (size_t i = 0; i < all.size(); ++i)
      if (!all[i].empty()) others.push_back(comm.ranks()[i]);
    if (others.empty()) continue;
    PITH_FAIL_HINT("start every rank with the same program, files and options",
      "{} of rank {} and of ranks [{}] differ; {}", name, comm.ranks()[0], fmt::join(others, ", "),
      *ranges::find_if_not(all, &string::empty));
  }
}
}
