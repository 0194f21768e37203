// Transfers of hidden states and their gradients between neighbouring pipeline stages.
#pragma once
#include <array>
#include <deque>

#include "core/mesh.h"

namespace pith {

// Four one-way flows join a stage with the next one: hidden states and gradients of chunk 0 (which
// runs down the stages) and of chunk 1 (which runs up), each a group of its own and in the order of
// micro-batches, so that no flow ever waits for another.
class StageLinks {
 public:
  enum class Kind { hidden, gradient };

  StageLinks(const Mesh& mesh, int64_t hidden_size, at::ScalarType dtype);

  // Does this stage's (kind, chunk) come from, or go to, another stage?
  bool receives(Kind kind, int chunk) const;
  bool sends(Kind kind, int chunk) const;
  // Starts receiving (tokens, H); takes what was expected first.
  void expect(Kind kind, int chunk, int64_t tokens);
  Tensor receive(Kind kind, int chunk, int64_t tokens);
  void send(Kind kind, int chunk, const Tensor& tensor);
  void finish();  // waits for all sends
 private:
  struct Transfer {
    Tensor tensor;
    Work work;
  };
  const Comm& link(Kind kind, int chunk, bool sending) const;

  const Mesh& mesh_;
  int64_t hidden_size_;
  at::ScalarType dtype_;
  std::array<std::deque<Transfer>, 4> expected_, sent_;  // [2 * chunk + kind]
};

}  // namespace pith
