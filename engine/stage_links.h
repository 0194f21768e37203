// Transfers of hidden states and their gradients between neighbouring pipeline stages.
#pragma once
#include <deque>

#include "core/mesh.h"

namespace pith {

// Four one-way flows join a stage with the next one: hidden states and gradients of chunk 0 (which
// runs down the stages) and of chunk 1 (which runs up), each a group of its own and in the order of
// micro-batches, so that no flow ever waits for another.
struct StageLink {
  const Comm *from, *to;  // null: it does not come from, or go to, another stage
  at::TensorOptions options;
  int64_t hidden_size;
  size_t ahead;  // messages that may be under way
  std::deque<std::pair<Tensor, Work>> expected = {};
  std::deque<Work> sent = {};

  // Starts receiving (tokens, H); receive() takes what was expected first.
  void expect(int64_t tokens) {
    Tensor buffer = at::empty({tokens, hidden_size}, options);
    expected.emplace_back(buffer, from->exchange_async({{1 - from->rank(), buffer, false}}));
  }
  Tensor receive(int64_t tokens) {
    if (expected.empty()) expect(tokens);
    auto [tensor, work] = std::move(expected.front());
    expected.pop_front();
    work.wait();
    check_shape(tensor, "a message between stages", {tokens, hidden_size});
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

// [2 * chunk + (1 for gradients)].
inline std::deque<StageLink> stage_links(
    const Mesh& mesh, int64_t hidden_size, at::ScalarType dtype) {
  const auto options = at::TensorOptions(mesh.device);
  const bool first = mesh.place.pp == 0, last = mesh.place.pp + 1 == mesh.pipeline.size();
  std::deque<StageLink> links;
  for (size_t i = 0; i < mesh.next.size(); ++i) {
    // Groups are set up at their first message; here, so that no stage waits for that later.
    for (const Comm& group : {mesh.previous[i], mesh.next[i]}) {
      Tensor probe = at::zeros({1}, options.dtype(at::kFloat));
      if (group.size() > 1) group.all_reduce(probe);
    }
    const Comm *before = first ? nullptr : &mesh.previous[i],
               *after = last ? nullptr : &mesh.next[i];
    // A stage is at most 2 P + 1 micro-batches ahead of its neighbour: older messages have arrived.
    links.push_back({before, after, options.dtype(dtype), hidden_size,
        static_cast<size_t>(2 * mesh.pipeline.size() + 1)});
    const bool down = i == 0 || i == 3;  // hidden states of chunk 0 and gradients of chunk 1
    if (!down) std::swap(links.back().from, links.back().to);
  }
  return links;
}

}  // namespace pith
