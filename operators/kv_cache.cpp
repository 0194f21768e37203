#include "operators/kv_cache.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

namespace pith {
namespace {

void reserve(Tensor& buffer, const Tensor& like, int64_t sequences, int64_t capacity) {
  if (buffer.defined() && buffer.size(1) >= capacity) return;
  const int64_t rounded = std::max<int64_t>(capacity, buffer.defined() ? 2 * buffer.size(1) : 256);
  Tensor grown = at::empty({sequences, rounded, like.size(1), like.size(2)}, like.options());
  if (buffer.defined()) grown.narrow(1, 0, buffer.size(1)).copy_(buffer);
  buffer = grown;
}

}  // namespace

CachedKeys append_to_cache(
    KvCache& cache, const Tensor& k, const Tensor& v, const AttentionSpan& fresh) {
  const int64_t sequences = fresh.cu_q_host.size(0) - 1;
  const int32_t* begin = fresh.cu_q_host.const_data_ptr<int32_t>();
  if (cache.lengths.empty()) cache.lengths.assign(static_cast<size_t>(sequences), 0);
  PITH_CHECK(static_cast<int64_t>(cache.lengths.size()) == sequences,
      "the cache holds {} sequences, the batch {}", cache.lengths.size(), sequences);
  int64_t capacity = 0;
  for (int64_t s = 0; s < sequences; ++s)
    capacity = std::max(capacity, cache.lengths[static_cast<size_t>(s)] + begin[s + 1] - begin[s]);
  reserve(cache.k, k, sequences, capacity);
  reserve(cache.v, v, sequences, capacity);

  CachedKeys all;
  std::vector<Tensor> keys, values;
  std::vector<int32_t> borders{0};
  for (int64_t s = 0; s < sequences; ++s) {
    int64_t& length = cache.lengths[static_cast<size_t>(s)];
    const int64_t count = begin[s + 1] - begin[s];
    const Tensor k_row = cache.k.select(0, s), v_row = cache.v.select(0, s);
    k_row.narrow(0, length, count).copy_(k.narrow(0, begin[s], count));
    v_row.narrow(0, length, count).copy_(v.narrow(0, begin[s], count));
    length += count;
    keys.push_back(k_row.narrow(0, 0, length));
    values.push_back(v_row.narrow(0, 0, length));
    borders.push_back(borders.back() + narrow<int32_t>(length));
    all.span.max_k = std::max(all.span.max_k, length);
  }
  all.k = at::cat(keys);
  all.v = at::cat(values);
  all.span.cu_q = fresh.cu_q;
  all.span.cu_q_host = fresh.cu_q_host;
  all.span.max_q = fresh.max_q;
  all.span.cu_k_host =
      at::from_blob(borders.data(), {static_cast<int64_t>(borders.size())}, at::kInt).clone();
  all.span.cu_k = all.span.cu_k_host.to(k.device());
  return all;
}

}  // namespace pith
