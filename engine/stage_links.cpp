#include "engine/stage_links.h"

namespace pith {
namespace {

size_t flow_of(StageLinks::Kind kind, int chunk) {
  return 2 * static_cast<size_t>(chunk) + (kind == StageLinks::Kind::gradient ? 1 : 0);
}

// Hidden states of chunk 0 and gradients of chunk 1 go from a stage to the next one.
bool runs_down(StageLinks::Kind kind, int chunk) {
  return (kind == StageLinks::Kind::hidden) == (chunk == 0);
}

}  // namespace

StageLinks::StageLinks(const Mesh& mesh, int64_t hidden_size, at::ScalarType dtype)
    : mesh_(mesh), hidden_size_(hidden_size), dtype_(dtype) {
  // Groups are set up at their first message; here, so that no stage waits for that later.
  for (const auto* links : {&mesh.previous, &mesh.next}) {
    for (const Comm& link : *links) {
      Tensor probe = at::zeros({1}, at::TensorOptions(mesh.device).dtype(at::kFloat));
      if (link.size() > 1) link.all_reduce(probe);
    }
  }
}

bool StageLinks::receives(Kind kind, int chunk) const {
  return runs_down(kind, chunk) ? mesh_.place.pp > 0 : mesh_.place.pp + 1 < mesh_.pipeline.size();
}

bool StageLinks::sends(Kind kind, int chunk) const {
  return runs_down(kind, chunk) ? mesh_.place.pp + 1 < mesh_.pipeline.size() : mesh_.place.pp > 0;
}

const Comm& StageLinks::link(Kind kind, int chunk, bool sending) const {
  return (runs_down(kind, chunk) == sending ? mesh_.next : mesh_.previous)[flow_of(kind, chunk)];
}

void StageLinks::expect(Kind kind, int chunk, int64_t tokens) {
  const Comm& from = link(kind, chunk, false);
  Tensor buffer = at::empty({tokens, hidden_size_}, at::TensorOptions(mesh_.device).dtype(dtype_));
  Work work = from.exchange_async({{1 - from.rank(), buffer, false}});
  expected_[flow_of(kind, chunk)].push_back({buffer, std::move(work)});
}

Tensor StageLinks::receive(Kind kind, int chunk, int64_t tokens) {
  auto& queue = expected_[flow_of(kind, chunk)];
  if (queue.empty()) expect(kind, chunk, tokens);
  Transfer transfer = std::move(queue.front());
  queue.pop_front();
  transfer.work.wait();
  check_shape(transfer.tensor, "a message between stages", {tokens, hidden_size_});
  return transfer.tensor;
}

void StageLinks::send(Kind kind, int chunk, const Tensor& tensor) {
  auto& queue = sent_[flow_of(kind, chunk)];
  const Comm& to = link(kind, chunk, true);
  Work work = to.exchange_async({{1 - to.rank(), tensor.contiguous(), true}});
  queue.push_back({tensor, std::move(work)});
  // A stage is at most 2 P + 1 micro-batches ahead of its neighbour: older messages have arrived.
  if (static_cast<int64_t>(queue.size()) > 2 * mesh_.pipeline.size() + 1) {
    queue.front().work.wait();
    queue.pop_front();
  }
}

void StageLinks::finish() {
  for (auto& queue : sent_) {
    for (Transfer& transfer : queue) transfer.work.wait();
    queue.clear();
  }
}

}  // namespace pith
