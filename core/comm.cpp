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

  std::string describe() const {
    return fmt::format("group {} [{}]", name, fmt::join(ranks, ", "));
  }
};

namespace {

const std::vector<int64_t>& self() {
  static const std::vector<int64_t> ranks{launch_info().rank};
  return ranks;
}

std::string comma_context() {
  const std::string context = comm_context();
  return context.empty() ? "" : ", " + context;
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

}  // namespace

Work::Work() noexcept = default;
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

Work Comm::start(Operation&& given) const {
  constexpr std::array kNames{"all_reduce", "all_gather", "reduce_scatter",
                              "all_to_all", "exchange",   "broadcast"};
  const std::string name = kNames[static_cast<size_t>(given.kind)];
  const Tensor &out = given.out, &in = given.in;
  PITH_CHECK(out.is_contiguous() && in.is_contiguous() && out.device() == in.device(),
             "{}: {} and {} must be contiguous and on one device", name, describe(out, "out"),
             describe(in, "in"));
  PITH_CHECK(out.scalar_type() == in.scalar_type() || given.kind == Kind::reduce_scatter,
             "{}: {} and {} differ in type", name, describe(out, "out"), describe(in, "in"));
  const at::NoGradGuard no_grad;
  if (size() == 1) {
    if (out.data_ptr() != in.data_ptr()) out.view(-1).copy_(in.view(-1));
    return {};
  }
  Impl& group = *impl_;
  const std::string count = fmt::format("{} #{}", name, group.operations);
  note_operation(fmt::format("{} of group {}", count, group.name));
  auto operation = std::make_unique<Operation>(std::move(given));
  operation->what = fmt::format("{} of {} in {}{}", count, describe(operation->in, "tensor"),
                                group.describe(), comma_context());
  operation->limit_s = comm_timeout_s() * (group.operations++ == 0 ? 3 : 1);
  if (operation->in.is_cpu()) {
    if (!launch_info().mpi) {
      PITH_FAIL_HINT("start with pithtrain launch or mpirun, or use run.device = \"cuda\"",
                     "{}: CPU tensors travel through MPI, which this job was not started with",
                     operation->what);
    }
    if (!group.mpi) {
      const Watched watched("setting up MPI for " + operation->what, operation->limit_s);
      group.mpi.emplace(group.ranks);
    }
    group.mpi->start(*operation);
    return Work(std::move(operation));
  }
#if PITH_CUDA
  if (operation->in.is_cuda()) {
    if (!group.nccl) {
      const Watched watched("setting up NCCL for " + operation->what, operation->limit_s);
      group.nccl.emplace(size(), rank(), operation->in.device(), [&](const std::string& id) {
        if (rank() == 0) store_set(group.key + "/nccl", id);
        return store_get({group.key + "/nccl"}).front();
      });
    }
    group.nccl->start(*operation);
    return Work(std::move(operation));
  }
#endif
  PITH_FAIL("{}: no transport for this device", operation->what);
}

Work Comm::all_reduce_async(Tensor& tensor, Reduce op) const {
  check_sum_type("all_reduce", tensor);
  return start({.kind = Kind::all_reduce, .out = tensor, .in = tensor, .reduce = op});
}

Work Comm::all_gather_async(Tensor& out, const Tensor& in, std::span<const int64_t> sizes) const {
  return start({.kind = Kind::all_gather,
                .out = out,
                .in = in,
                .recv = part_sizes("all_gather", sizes, *this, out, in)});
}

Work Comm::reduce_scatter_async(Tensor& out, const Tensor& in,
                                std::span<const int64_t> sizes) const {
  check_sum_type("reduce_scatter", in);
  PITH_CHECK(at::isFloatingType(in.scalar_type()), "reduce_scatter sums floating point, not {}",
             describe(in, "in"));
  return start({.kind = Kind::reduce_scatter,
                .out = out,
                .in = in,
                .send = part_sizes("reduce_scatter", sizes, *this, in, out)});
}

Work Comm::all_to_all_async(Tensor& out, const Tensor& in, std::span<const int64_t> recv_splits,
                            std::span<const int64_t> send_splits) const {
  return start({.kind = Kind::all_to_all,
                .out = out,
                .in = in,
                .recv = elements("all_to_all (out)", recv_splits, *this, out),
                .send = elements("all_to_all (in)", send_splits, *this, in)});
}

Work Comm::exchange_async(const std::vector<P2P>& messages) const {
  if (messages.empty()) return {};
  for (const P2P& message : messages) {
    PITH_CHECK(message.peer >= 0 && message.peer < size() && message.peer != rank() &&
                   message.tensor.is_contiguous(),
               "exchange in group {} of {}: {} cannot go to or come from member {}", name(), size(),
               describe(message.tensor, "tensor"), message.peer);
  }
  const Tensor& first = messages.front().tensor;
  return start({.kind = Kind::exchange, .out = first, .in = first, .messages = messages});
}

Work Comm::broadcast_async(Tensor& tensor, int64_t root) const {
  PITH_CHECK(root >= 0 && root < size(), "broadcast in group {} of {}: no member {}", name(),
             size(), root);
  return start({.kind = Kind::broadcast, .out = tensor, .in = tensor, .root = root});
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

std::vector<std::string> Comm::all_gather_strings(const std::string& mine) const {
  if (size() == 1) return {mine};
  const int64_t round = impl_->rounds++;
  const std::string what =
      fmt::format("all_gather_strings #{} in {}{}", round, impl_->describe(), comma_context());
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
