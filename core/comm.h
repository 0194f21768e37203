// A process group and its collectives. This build runs one process: every group has size one.
#pragma once
#include <vector>

#include "core/tensor.h"

namespace pith {

// Collectives of one group. With one member each of them is the identity and costs nothing.
class Comm {
 public:
  int64_t size() const { return 1; }
  int64_t rank() const { return 0; }

  // Sums `tensor` over the group in place.
  void all_reduce(Tensor& tensor) const { (void)tensor; }
  // Rows of `input`, split_sizes[i] of them for member i, travel to their members; returns the
  // received rows.
  Tensor all_to_all(const Tensor& input, const std::vector<int64_t>& split_sizes) const {
    PITH_CHECK(split_sizes.size() == 1 && split_sizes[0] == input.size(0),
               "all_to_all in a group of one: splits must be [{}]", input.size(0));
    return input;
  }
};

}  // namespace pith
