#include "operators/kv_cache.h"

namespace pith {
AttentionSpan append_to_cache(
  KvCache& cache, const Tensor& k, const Tensor& v, const AttentionSpan& fresh) {
  const int32_t* begin = fresh.cu_q_host.const_data_ptr<int32_t>();
  const int64_t sequences = fresh.cu_q_host.numel() - 1;
  vector<int32_t>& end = cache.borders;
  if (end.empty()) end.assign(index(sequences + 1), 0);
  PITH_CHECK(ssize(end) == sequences + 1, "the cache holds {} sequences, the batch {}",
    ssize(end) - 1, sequences);
  const auto append = [&](Tensor& held, const Tensor& rows) {
    vector<Tensor> parts;
    for (size_t s = 0; s + 1 < end.size(); ++s) {
      if (held.defined()) parts.push_back(held.slice(0, end[s], end[s + 1]));
      parts.push_back(rows.slice(0, begin[s], begin[s + 1]));
    }
    held = at::cat(parts);
  };
  append(cache.k, k);
  append(cache.v, v);
  AttentionSpan all = fresh;
  all.max_k = 0;
  for (size_t s = 0; s < end.size(); ++s) {
    end[s] = narrow<int32_t>(int64_t{end[s]} + begin[s]);
    if (s > 0) all.max_k = max<int64_t>(all.max_k, end[s] - end[s - 1]);
  }
  all.cu_k_host = at::tensor(end, kInt);
  all.cu_k = all.cu_k_host.to(k.device());
  return all;
}
}
