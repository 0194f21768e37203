// Transfers of hidden states and their gradients between neighbouring pipeline stages.
#pragma once
#include <deque>

#include "core/mesh.h"

namespace pith {

// One-way flows join a stage with the next one: hidden states and gradients of chunk 0 (which runs
// down the stages) and of chunk 1 (which runs up), and of a shared head, each a group of its own
// and in the order of micro-batches, so that no flow ever waits for another.
struct StageLink {
  const Comm *from, *to;  // null: it does not come from, or go to, another stage
  at::TensorOptions options;
  int64_t hidden_size;
  size_t ahead;  // messages that may be under way
  std::deque<Work> sent = {};

  // (tokens, H). Asked for only when it is needed: NCCL holds processors while it waits, and a GPU
  // that computes meanwhile loses more by that than the transfer takes.
  Tensor receive(int64_t tokens) {
    Tensor tensor = at::empty({tokens, hidden_size}, options);
    from->exchange_async({{1 - from->rank(), tensor, false}}).wait();
    return tensor;
  }
  void send(const Tensor& tensor) {
    sent.push_back(to->exchange_async({{1 - to->rank(), tensor.contiguous(), true}}));
    if (sent.size() > ahead) wait_for_oldest();
  }
  void finish() {
    while (!sent.empty()) wait_for_oldest();
  }
 private:
  void wait_for_oldest() {
    sent.front().wait();
    sent.pop_front();
  }
};

// [2 * chunk + (1 for gradients)], the head as a third chunk where the first two stages share it.
inline std::deque<StageLink> stage_links(
    const Mesh& mesh, int64_t hidden_size, at::ScalarType dtype) {
  const auto options = at::TensorOptions(mesh.device);
  const bool first = mesh.place.pp == 0, last = mesh.place.pp + 1 == mesh.pipeline.size();
  std::deque<StageLink> links;
  for (size_t i = 0; i < (mesh.shape.head_share > 0 ? 6U : 4U); ++i) {
    // Groups connect at their first message, which waits for the other side: here, not behind one.
    for (const Comm& group : {mesh.previous[i], mesh.next[i]}) {
      if (group.size() == 1) continue;
      const Tensor out = at::zeros({1}, options.dtype(at::kFloat)), in = at::empty_like(out);
      const int64_t peer = 1 - group.rank();
      group.exchange_async({{peer, out, true}, {peer, in, false}}).wait();
    }
    const Comm *before = first ? nullptr : &mesh.previous[i],
               *after = last ? nullptr : &mesh.next[i];
    // A stage is at most 2 P + 1 micro-batches ahead of its neighbour: older messages have arrived.
    links.push_back({before, after, options.dtype(dtype), hidden_size,
        static_cast<size_t>(2 * mesh.pipeline.size() + 1)});
    const bool down = i == 0 || i == 3 || i == 4;  // the others run up
    if (!down) std::swap(links.back().from, links.back().to);
  }
  return links;
}

}  // namespace pith
