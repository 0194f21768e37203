#include "core/comm.h"

#include <ATen/ops/empty.h>
#include <xxhash.h>

#include <algorithm>
#include <exception>
#include <map>
#include <numeric>

#include "core/transport.h"

namespace pith {

struct Comm::Impl {
  std::vector<int64_t> ranks;
  int64_t rank;
  std::string name, key;  // key: the group's place in the store
  std::optional<MpiGroup> mpi;
#if PITH_CUDA
  std::optional<NcclGroup> nccl;
#endif
  int64_t operations = 0, rounds = 0;  // so far: collectives, gathers of strings

  std::string describe() const { return fmt::format("group {} [{}]", name, fmt::join(ranks, ", ")); }

  std::unique_ptr<Operation> begin(const char* operation, const Tensor& tensor) {
    auto result = std::make_unique<Operation>();
    result->what = fmt::format("{} #{} of {} in {}", operation, operations,
                               pith::describe(tensor, "tensor"), describe());
    if (!comm_context().empty()) result->what += ", " + comm_context();
    result->limit_s = comm_timeout_s() * (operations == 0 ? 3 : 1);
    note_operation(fmt::format("{} #{} of group {}", operation, operations, name));
    ++operations;
    return result;
  }
};

namespace {

const std::vector<int64_t>& self() {
  static const std::vector<int64_t> ranks{launch_info().rank};
  return ranks;
}

// Sizes as the caller gave them, or all equal; checked against the tensors' elements.
std::vector<int64_t> part_sizes(const char* operation, std::span<const int64_t> sizes,
                                const Comm& comm, const Tensor& whole, const Tensor& part) {
  std::vector<int64_t> result(sizes.begin(), sizes.end());
  if (sizes.empty()) result.assign(static_cast<size_t>(comm.size()), part.numel());
  PITH_CHECK(std::ssize(result) == comm.size() &&
                 result[static_cast<size_t>(comm.rank())] == part.numel() &&
                 std::reduce(result.begin(), result.end()) == whole.numel(),
             "{} in group {}: parts [{}] do not fit {} and, on member {}, {}", operation,
             comm.name(), fmt::join(result, ", "), describe(whole, "whole"), comm.rank(),
             describe(part, "part"));
  return result;
}

void check_sum_type(const char* operation, const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  const bool integer = type == at::kLong || type == at::kInt;
  PITH_CHECK(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || integer,
             "{} cannot reduce {}", operation, describe(tensor, "tensor"));
}

void check_pair(const char* operation, const Tensor& out, const Tensor& in) {
  PITH_CHECK(out.is_contiguous() && in.is_contiguous() && out.device() == in.device(),
             "{}: {} and {} must be contiguous and on one device", operation, describe(out, "out"),
             describe(in, "in"));
}

// Elements to and from each member, from rows.
std::vector<int64_t> elements(const char* operation, std::span<const int64_t> splits,
                              const Comm& comm, const Tensor& tensor) {
  PITH_CHECK(tensor.dim() > 0 && std::ssize(splits) == comm.size() &&
                 std::reduce(splits.begin(), splits.end()) == tensor.size(0) &&
                 std::ranges::all_of(splits, [](int64_t rows) { return rows >= 0; }),
             "{} in group {} of {}: splits [{}] do not cut {}", operation, comm.name(), comm.size(),
             fmt::join(splits, ", "), describe(tensor, "rows"));
  const auto row = std::accumulate(tensor.sizes().begin() + 1, tensor.sizes().end(), int64_t{1},
                                   std::multiplies<>());
  std::vector<int64_t> result;
  for (const int64_t rows : splits) result.push_back(rows * row);
  return result;
}

void copy_unless_same(const Tensor& out, const Tensor& in) {
  if (out.data_ptr() != in.data_ptr()) out.view(-1).copy_(in.view(-1));
}

}  // namespace

Work::Work(std::unique_ptr<Operation> operation) : operation_(std::move(operation)) {}
Work::Work(Work&&) noexcept = default;

Work& Work::operator=(Work&& other) noexcept {
  Work old(std::move(*this));  // waits at the end of this scope
  operation_ = std::move(other.operation_);
  return *this;
}

Work::~Work() {
  if (std::uncaught_exceptions() > 0) {
    (void)operation_.release();  // its buffers may still be written; the process is about to end
    return;
  }
  wait();
}

void Work::wait() {
  const auto operation = std::exchange(operation_, nullptr);
  if (!operation) return;
#if PITH_CUDA
  if (operation->done) nccl_wait(*operation);
#endif
  if (!operation->requests.empty()) mpi_wait(*operation);
  const at::NoGradGuard no_grad;
  if (operation->finish) operation->finish();
}

int64_t Comm::size() const { return std::ssize(ranks()); }
int64_t Comm::rank() const { return impl_ ? impl_->rank : 0; }
const std::vector<int64_t>& Comm::ranks() const { return impl_ ? impl_->ranks : self(); }

const std::string& Comm::name() const {
  static const std::string alone = "self";
  return impl_ ? impl_->name : alone;
}

template <class Start>
Work Comm::start(const char* operation, const Tensor& tensor, const Start& start_on) const {
  PITH_CHECK(tensor.is_contiguous(), "{}: {} is not contiguous", operation,
             describe(tensor, "tensor"));
  auto result = impl_->begin(operation, tensor);
  const at::NoGradGuard no_grad;
  if (tensor.is_cpu()) {
    if (!launch_info().mpi) {
      PITH_FAIL_HINT("start with pithtrain launch or mpirun, or use run.device = \"cuda\"",
                     "{}: CPU tensors travel through MPI, which this job was not started with",
                     result->what);
    }
    if (!impl_->mpi) {
      const Watched watched("setting up MPI for " + result->what, result->limit_s);
      impl_->mpi.emplace(impl_->ranks);
    }
    start_on(*impl_->mpi, *result);
    return Work(std::move(result));
  }
#if PITH_CUDA
  if (tensor.is_cuda()) {
    if (!impl_->nccl) {
      const Watched watched("setting up NCCL for " + result->what, result->limit_s);
      const std::string key = impl_->key + "/nccl";
      impl_->nccl.emplace(size(), rank(), tensor.device(), [&](const std::string& id) {
        if (rank() == 0) store_set(key, id);
        return store_get({key}).front();
      });
    }
    start_on(*impl_->nccl, *result);
    return Work(std::move(result));
  }
#endif
  PITH_FAIL("{}: no transport for this device", result->what);
}

Work Comm::all_reduce_async(Tensor& tensor, Reduce op) const {
  if (size() == 1) return {};
  check_sum_type("all_reduce", tensor);
  return start("all_reduce", tensor, [&](auto& group, Operation& operation) {
    group.all_reduce(operation, tensor, op);
  });
}

Work Comm::all_gather_async(Tensor& out, const Tensor& in, std::span<const int64_t> sizes) const {
  const std::vector<int64_t> parts = part_sizes("all_gather", sizes, *this, out, in);
  check_pair("all_gather", out, in);
  check_dtype(out, "all_gather out", in.scalar_type());
  if (size() == 1) {
    copy_unless_same(out, in);
    return {};
  }
  return start("all_gather", out, [&](auto& group, Operation& operation) {
    group.all_gather(operation, out, in, parts);
  });
}

Work Comm::reduce_scatter_async(Tensor& out, const Tensor& in,
                                std::span<const int64_t> sizes) const {
  const std::vector<int64_t> parts = part_sizes("reduce_scatter", sizes, *this, in, out);
  check_pair("reduce_scatter", out, in);
  PITH_CHECK(at::isFloatingType(in.scalar_type()), "reduce_scatter sums floating point, not {}",
             describe(in, "in"));
  check_sum_type("reduce_scatter", in);
  if (size() == 1) {
    copy_unless_same(out, in);
    return {};
  }
  return start("reduce_scatter", in, [&](auto& group, Operation& operation) {
    group.reduce_scatter(operation, out, in, parts);
  });
}

Work Comm::all_to_all_async(Tensor& out, const Tensor& in, std::span<const int64_t> recv_splits,
                            std::span<const int64_t> send_splits) const {
  const auto recv = elements("all_to_all (out)", recv_splits, *this, out);
  const auto send = elements("all_to_all (in)", send_splits, *this, in);
  check_pair("all_to_all", out, in);
  check_dtype(out, "all_to_all out", in.scalar_type());
  if (size() == 1) {
    copy_unless_same(out, in);
    return {};
  }
  return start("all_to_all", in, [&](auto& group, Operation& operation) {
    group.all_to_all(operation, out, in, recv, send);
  });
}

Work Comm::exchange_async(const std::vector<P2P>& messages) const {
  if (messages.empty()) return {};
  for (const P2P& message : messages) {
    PITH_CHECK(message.peer >= 0 && message.peer < size() && message.peer != rank() &&
                   message.tensor.is_contiguous(),
               "exchange in group {} of {}: {} cannot go to or come from member {}", name(), size(),
               describe(message.tensor, "tensor"), message.peer);
  }
  return start("exchange", messages.front().tensor, [&](auto& group, Operation& operation) {
    std::string peers;
    for (const P2P& message : messages)
      peers += fmt::format("{}{}", message.is_send ? " to " : " from ", ranks()[message.peer]);
    operation.what += ", world ranks:" + peers;
    group.exchange(operation, messages);
  });
}

Work Comm::broadcast_async(Tensor& tensor, int64_t root) const {
  PITH_CHECK(root >= 0 && root < size(), "broadcast in group {} of {}: no member {}", name(),
             size(), root);
  if (size() == 1) return {};
  return start("broadcast", tensor, [&](auto& group, Operation& operation) {
    group.broadcast(operation, tensor, root);
  });
}

void Comm::all_reduce(Tensor& tensor, Reduce op) const { all_reduce_async(tensor, op).wait(); }

void Comm::all_gather(Tensor& out, const Tensor& in, std::span<const int64_t> sizes) const {
  all_gather_async(out, in, sizes).wait();
}

void Comm::reduce_scatter(Tensor& out, const Tensor& in, std::span<const int64_t> sizes) const {
  reduce_scatter_async(out, in, sizes).wait();
}

Tensor Comm::all_to_all(const Tensor& in, std::span<const int64_t> recv_splits,
                        std::span<const int64_t> send_splits) const {
  if (size() == 1) {
    elements("all_to_all", send_splits, *this, in);
    return in;
  }
  std::vector<int64_t> shape = in.sizes().vec();
  shape.at(0) = std::reduce(recv_splits.begin(), recv_splits.end());
  Tensor out = at::empty(shape, in.options());
  all_to_all_async(out, in, recv_splits, send_splits).wait();
  return out;
}

void Comm::exchange(const std::vector<P2P>& messages) const { exchange_async(messages).wait(); }

void Comm::broadcast(Tensor& tensor, int64_t root) const { broadcast_async(tensor, root).wait(); }

std::vector<std::string> Comm::all_gather_strings(const std::string& mine) const {
  if (size() == 1) return {mine};
  const int64_t round = impl_->rounds++;
  const std::string what = fmt::format("all_gather_strings #{} in {}{}{}", round,
                                       impl_->describe(), comm_context().empty() ? "" : ", ",
                                       comm_context());
  const Watched watched(what, comm_timeout_s() * (round == 0 ? 3 : 1));
  note_operation(fmt::format("all_gather_strings #{} of group {}", round, name()));
  const auto key = [&](int64_t of_round, int64_t member) {
    return fmt::format("{}/{}/{}", impl_->key, of_round, member);
  };
  std::vector<std::string> keys;
  for (int64_t member = 0; member < size(); ++member) keys.push_back(key(round, member));
  store_set(keys[static_cast<size_t>(rank())], mine);
  std::vector<std::string> result = store_get(keys);
  // Every member is in this round, so every member has read the one before.
  if (round > 0) store_delete(key(round - 1, rank()));
  return result;
}

void Comm::barrier() const { all_gather_strings(""); }

Comm World::group(std::vector<int64_t> ranks, const std::string& name) const {
  PITH_CHECK(std::ranges::is_sorted(ranks) && !ranks.empty() && ranks.front() >= 0 &&
                 ranks.back() < size() && std::ranges::adjacent_find(ranks) == ranks.end() &&
                 std::ranges::binary_search(ranks, rank()),
             "group {} [{}] of {} ranks: must be ascending ranks, {} among them", name,
             fmt::join(ranks, ", "), size(), rank());
  static std::map<std::string, int64_t> made;  // groups with one name and the same ranks
  auto impl = std::make_shared<Comm::Impl>();
  impl->name = name;
  const auto hash = XXH3_64bits(ranks.data(), ranks.size() * sizeof(int64_t));
  impl->key = fmt::format("group/{}/{:x}", name, hash);
  impl->key += fmt::format("/{}", made[impl->key]++);
  impl->rank = std::ranges::lower_bound(ranks, rank()) - ranks.begin();
  impl->ranks = std::move(ranks);
  return Comm(std::move(impl));
}

Comm World::all() const {
  std::vector<int64_t> ranks(static_cast<size_t>(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group(std::move(ranks), "world");
}

void check_same_everywhere(const Comm& comm,
                           const std::vector<std::pair<std::string, std::string>>& items) {
  std::string hashes;
  for (const auto& [name, text] : items)
    hashes += fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
  const std::vector<std::string> all = comm.all_gather_strings(hashes);
  for (size_t item = 0; item < items.size(); ++item) {
    const auto hash = [&](size_t member) { return all[member].substr(item * 16, 16); };
    std::vector<int64_t> others;
    size_t first_other = 0;
    for (size_t member = all.size(); member-- > 0;) {
      if (hash(member) == hash(0)) continue;
      others.insert(others.begin(), comm.ranks()[member]);
      first_other = member;
    }
    if (others.empty()) continue;
    const std::vector<std::string> texts = comm.all_gather_strings(items[item].second);
    const std::string &a = texts[0], &b = texts[first_other];
    const auto differ = std::ranges::mismatch(a, b);
    const auto at = static_cast<size_t>(differ.in1 - a.begin());
    const auto line_start = at == 0 ? 0 : a.rfind('\n', at - 1) + 1;  // npos + 1 = 0
    const auto line = [&](const std::string& text) {
      return text.substr(line_start, text.find('\n', line_start) - line_start);
    };
    PITH_FAIL_HINT("start every rank with the same program, files and options",
                   "{} of rank {} and of ranks [{}] differ; line {}: '{}' and '{}'",
                   items[item].first, comm.ranks()[0], fmt::join(others, ", "),
                   std::count(a.begin(), a.begin() + static_cast<int64_t>(line_start), '\n') + 1,
                   line(a), line(b));
  }
}

}  // namespace pith
