#include "operators/kv_cache.h"

#include <ATen/ops/tensor.h>

namespace pith {

CachedKeys append_to_cache(
    KvCache& cache, const Tensor& k, const Tensor& v, const AttentionSpan& fresh) {
  const int64_t sequences = fresh.cu_q_host.size(0) - 1;
  const int32_t* begin = fresh.cu_q_host.const_data_ptr<int32_t>();
  if (cache.lengths.empty()) cache.lengths.assign(static_cast<size_t>(sequences), 0);
  PITH_CHECK(std::ssize(cache.lengths) == sequences, "the cache holds {} sequences, the batch {}",
      cache.lengths.size(), sequences);
  CachedKeys all{.k = {}, .v = {}, .span = fresh};
  all.span.max_k = 0;
  std::vector<int32_t> borders{0};
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = cache.lengths[static_cast<size_t>(s)] + begin[s + 1] - begin[s];
    all.span.max_k = std::max(all.span.max_k, length);
    borders.push_back(narrow<int32_t>(borders.back() + length));
  }
  // Appends to a buffer, grown where it must be; -> all that it holds, packed.
  const auto append = [&](Tensor& buffer, const Tensor& rows) {
    const int64_t capacity = buffer.defined() ? buffer.size(1) : 0;
    if (capacity < all.span.max_k) {
      const int64_t grown = std::max({all.span.max_k, 2 * capacity, int64_t{256}});
      const Tensor old = buffer;
      buffer = at::empty({sequences, grown, rows.size(1), rows.size(2)}, rows.options());
      if (capacity > 0) buffer.narrow(1, 0, capacity).copy_(old);
    }
    std::vector<Tensor> held;
    for (int64_t s = 0; s < sequences; ++s) {
      const int64_t length = cache.lengths[static_cast<size_t>(s)], count = begin[s + 1] - begin[s];
      const Tensor row = buffer.select(0, s);
      row.narrow(0, length, count).copy_(rows.narrow(0, begin[s], count));
      held.push_back(row.narrow(0, 0, length + count));
    }
    return at::cat(held);
  };
  all.k = append(cache.k, k);
  all.v = append(cache.v, v);
  for (int64_t s = 0; s < sequences; ++s)
    cache.lengths[static_cast<size_t>(s)] += begin[s + 1] - begin[s];
  all.span.cu_k_host = at::tensor(borders, at::kInt);
  all.span.cu_k = all.span.cu_k_host.to(k.device());
  return all;
}

}  // namespace pith
