// Document borders for tests of attention. Provides make_span.
#pragma once
#include <ATen/ops/empty.h>
#include <algorithm>
#include <vector>
#include "operators/attention.h"

namespace pith::test {

// Borders of queries and keys, with their copies on `device`.
inline AttentionSpan make_span(const std::vector<int32_t>& cu_q, const std::vector<int32_t>& cu_k,
  at::Device device = at::kCPU) {
  auto tensor = [](const std::vector<int32_t>& values) {
    Tensor out = at::empty({static_cast<int64_t>(values.size())}, at::TensorOptions(at::kInt));
    std::copy(values.begin(), values.end(), out.mutable_data_ptr<int32_t>());
    return out;
  };
  auto longest = [](const std::vector<int32_t>& values) {
    int64_t most = 0;
    for (size_t d = 1; d < values.size(); ++d)
      most = std::max<int64_t>(most, values[d] - values[d - 1]);
    return most;
  };
  AttentionSpan span;
  span.cu_q_host = tensor(cu_q);
  span.cu_k_host = tensor(cu_k);
  span.cu_q = span.cu_q_host.to(device);
  span.cu_k = span.cu_k_host.to(device);
  span.max_q = longest(cu_q);
  span.max_k = longest(cu_k);
  return span;
}

// As many keys as queries.
inline AttentionSpan make_span(const std::vector<int32_t>& cu, at::Device device = at::kCPU) {
  return make_span(cu, cu, device);
}

} // namespace pith::test
