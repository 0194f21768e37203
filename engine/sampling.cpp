#include "engine/sampling.h"
#include "core/random.h"

namespace pith {
int64_t sample(span<const float> logits, const SamplingOptions& options, uint64_t draw_index) {
  PITH_CHECK(options.temperature >= 0 && isfinite(options.temperature),
    "temperature {}: must be a finite number of at least 0", options.temperature);
  for (const auto& [name, p]: {pair{"top_p", options.top_p}, {"min_p", options.min_p}})
    PITH_CHECK(p >= 0 && p <= 1, "{} {}: must be in [0, 1]", name, p);
  PITH_CHECK(options.top_k >= 0, "top_k {}: must be at least 0", options.top_k);
  size_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    PITH_CHECK(logits[i] < numeric_limits<float>::infinity(), // false for NaN
      "sampling: the logit of token {} is {}", i, logits[i]);
    if (logits[i] > logits[best]) best = i;
  }
  PITH_CHECK(isfinite(logits[best]), "sampling: every logit is -inf");
  if (options.temperature == 0 || options.top_k == 1) return int64_t(best);

  // Candidates, always in an order that depends on the logits alone: ids until a filter sorts them.
  vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    const float x = logits[index(a)], y = logits[index(b)];
    return x != y ? x > y : a < b;
  };
  const auto weight = [&](int32_t id) { // probability over that of the best token
    const double difference = double{logits[index(id)]} - double{logits[best]};
    return std::exp(difference / options.temperature);
  };
  const auto total_weight = [&] {
    return std::accumulate(
      ids.begin(), ids.end(), 0.0, [&](double sum, int32_t id) { return sum + weight(id); });
  };
  if (options.top_k > 0 && options.top_k < ssize(ids)) {
    std::partial_sort(ids.begin(), ids.begin() + options.top_k, ids.end(), likelier);
    ids.resize(index(options.top_k));
  }
  if (options.top_p < 1) {
    const double wanted = options.top_p * total_weight();
    const auto less_likely = [&](int32_t a, int32_t b) { return likelier(b, a); };
    ranges::make_heap(ids, less_likely);
    vector<int32_t> kept;
    for (double sum = 0; !ids.empty() && (kept.empty() || sum < wanted); ids.pop_back()) {
      ranges::pop_heap(ids, less_likely);
      kept.push_back(ids.back());
      sum += weight(ids.back());
    }
    ids = std::move(kept);
  }
  if (options.min_p > 0) std::erase_if(ids, [&](int32_t id) { return weight(id) < options.min_p; });

  const Philox4 bits = philox(stream_key(options.seed, "sampling"), draw_index);
  const uint64_t high = bits.word[0] >> 5, low = bits.word[1] >> 6; // 53 bits: uniform in [0, 1)
  const double target = real((high << 26) | low) * 0x1p-53 * total_weight();
  double sum = 0;
  int32_t drawn = int32_t(best);
  for (const int32_t id: ids) {
    const double w = weight(id);
    if (w > 0) drawn = id; // the last one also catches a target lost to rounding
    sum += w;
    if (w > 0 && sum > target) break;
  }
  return drawn;
}
}
