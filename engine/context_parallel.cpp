#include "engine/batches.h"

namespace pith {
namespace {
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// First token of each unsplit row, and the end of the last.
vector<int64_t> row_borders(const MicroBatch& whole, int64_t size) {
  check_shape(whole.row_id, "split_context: row_id", {whole.num_tokens()});
  PITH_CHECK(whole.row_id.is_cpu() && whole.ring.empty(),
    "split_context takes an unsplit micro-batch on the CPU");
  const int32_t* row = whole.row_id.const_data_ptr<int32_t>();
  vector<int64_t> borders(index(whole.num_rows) + 1, 0);
  for (int64_t t = 0; t < whole.num_tokens(); ++t)
    borders.at(index(row[t] < 0 ? ~row[t] : row[t]) + 1) = t + 1;
  for (size_t i = 0; i + 1 < borders.size(); ++i) {
    if ((borders[i + 1] - borders[i]) % (2 * size) == 0) continue;
    PITH_FAIL_HINT(fmt::format("choose a sequence length that is a multiple of {}", 2 * size),
      "row {} has {} tokens: {} context-parallel ranks cut rows into {} equal chunks", i,
      borders[i + 1] - borders[i], size, 2 * size);
  }
  return borders;
}

// Calls f(queries, keys) for each document with queries on `rank` that see keys of `peer`: its
// local tokens that take part. On the same rank both are all it has there, and causal; a rank
// before gives its low chunk; after it only the high chunk's queries come.
template <class F> void for_each_piece(const MicroBatch& whole, const vector<int64_t>& rows,
  int64_t rank, int64_t peer, int64_t size, F&& f) {
  const int32_t* cu = whole.cu_seqlens_host.const_data_ptr<int32_t>();
  size_t row = 0;
  for (int64_t d = 0; d + 1 < whole.cu_seqlens_host.numel(); ++d) {
    if (cu[d + 1] == cu[d]) continue;
    while (rows.at(row + 1) <= cu[d]) ++row;
    PITH_CHECK(cu[d + 1] <= rows[row + 1], "document {} does not end in row {}", d, row);
    const int64_t begin = rows[row], chunk = (rows[row + 1] - begin) / (2 * size);
    const auto held = [&](int64_t member, bool high) -> Range {
      const int64_t first = begin + chunk * (high ? 2 * size - 1 - member : member);
      const int64_t local = begin / size + (high ? chunk : 0) - first;
      return {std::clamp<int64_t>(cu[d], first, first + chunk) + local,
        std::clamp<int64_t>(cu[d + 1], first, first + chunk) + local};
    };
    // A document in both chunks reaches the low one's end and the high one's start: neighbours.
    const auto both = [&](int64_t member) -> Range {
      const Range low = held(member, false), high = held(member, true);
      if (low.size() == 0) return high;
      return {low.begin, high.size() == 0 ? low.end : high.end};
    };
    const Range queries = peer > rank ? held(rank, true) : both(rank);
    const Range keys = peer < rank ? held(peer, false) : both(peer);
    if (queries.size() > 0 && keys.size() > 0) f(queries, keys);
  }
}

struct Side {
  vector<int64_t> index, cu{0};
  int64_t longest = 0;

  void add(const Range& range) {
    for (int64_t t = range.begin; t < range.end; ++t) index.push_back(t);
    cu.push_back(ssize(index));
    longest = max(longest, range.size());
  }
  RowSet rows(Device device) const {
    if (index.empty()) return {};
    RowSet set{index.front(), ssize(index), {}};
    const bool neighbours = index.back() - index.front() + 1 == set.count; // ascending
    if (!neighbours) set.index = upload(tensor_of(index), device);
    return set;
  }
};

AttentionSpan span_between(const Side& queries, const Side& keys, Device device) {
  const Tensor cu_q = tensor_of(queries.cu, kInt), cu_k = tensor_of(keys.cu, kInt);
  return {upload(cu_q, device), upload(cu_k, device), cu_q, cu_k, queries.longest, keys.longest};
}

// A rank's tokens in the unsplit rows, in order.
vector<int64_t> tokens_of(const vector<int64_t>& rows, int64_t rank, int64_t size) {
  vector<int64_t> tokens;
  for (size_t i = 0; i + 1 < rows.size(); ++i) {
    const int64_t chunk = (rows[i + 1] - rows[i]) / (2 * size);
    for (const int64_t number: {rank, 2 * size - 1 - rank})
      for (int64_t t = 0; t < chunk; ++t) tokens.push_back(rows[i] + number * chunk + t);
  }
  return tokens;
}

Gather gather_of(const vector<int64_t>& from, int64_t rows, Device device) {
  vector<vector<int64_t>> places(index(rows));
  size_t most = 1;
  for (size_t i = 0; i < from.size(); ++i) {
    auto& its = places.at(index(from[i]));
    its.push_back(int64_t(i));
    most = max(most, its.size());
  }
  vector<int64_t> table;
  for (auto& its: places) {
    its.resize(most, -1);
    table.insert(table.end(), its.begin(), its.end());
  }
  return {upload(tensor_of(from, kInt), device),
    upload(tensor_of(table, kInt).view({rows, int64_t(most)}), device)};
}

Halo halo_of(const MicroBatch& whole, const vector<int64_t>& rows, int64_t rank, int64_t size,
  int64_t window, Device device) {
  vector<pair<int64_t, int64_t>> homes(index(rows.back()));
  const auto home = [&](int64_t position) -> auto& { return homes[index(position)]; };
  for (int64_t member = 0; member < size; ++member) { // rank and token of each position
    int64_t token = 0;
    for (const int64_t position: tokens_of(rows, member, size)) home(position) = {member, token++};
  }
  const int32_t* in_document = whole.positions.const_data_ptr<int32_t>();
  const auto ranks = index(size);
  vector<int64_t> sent, send(ranks), received(ranks), next(ranks);
  Side queries, keys; // of this rank, in the unsplit rows
  for (int64_t member = 0; member < size; ++member) {
    const vector<int64_t> its = tokens_of(rows, member, size);
    for (size_t i = 0, end = 1; i < its.size(); i = end++) { // neighbours in a document
      while (end < its.size() && its[end] == its[end - 1] + 1 && in_document[its[end]] > 0) ++end;
      const int64_t first = its[i] - min<int64_t>(in_document[its[i]], window - 1);
      const Range reached{first, its[end - 1] + 1};
      if (member == rank) queries.add({its[i], reached.end}), keys.add(reached);
      for (int64_t key = first; key < reached.end; ++key)
        if (home(key).first == rank) sent.push_back(home(key).second), ++send[index(member)];
    }
  }
  for (const int64_t key: keys.index) ++received[index(home(key).first)];
  std::exclusive_scan(received.begin(), received.end(), next.begin(), int64_t{0});
  for (int64_t& key: keys.index) key = next[index(home(key).first)]++;
  return {window, gather_of(sent, rows.back() / size, device), send, received,
    gather_of(keys.index, ssize(keys.index), device), span_between(queries, keys, device)};
}
}

MicroBatch split_context(
  const MicroBatch& whole, int64_t rank, int64_t size, Device device, int64_t window) {
  const auto rows = row_borders(whole, size);
  const Tensor kept = tensor_of(tokens_of(rows, rank, size));
  MicroBatch part = whole;
  part.trained_tokens = whole.labels.index_select(0, kept).ne(-100).sum().item<int64_t>();
  for (Tensor* tensor: {&part.tokens, &part.labels, &part.positions, &part.row_id})
    *tensor = upload(tensor->index_select(0, kept), device);
  part.cu_seqlens = upload(whole.cu_seqlens_host, device);
  for (int64_t i = 0; size > 1 && i < size; ++i) {
    Side queries, keys;
    for_each_piece(whole, rows, rank, (rank + size - i) % size, size,
      [&](const Range& q, const Range& k) { queries.add(q), keys.add(k); });
    part.ring.push_back(
      {queries.rows(device), keys.rows(device), span_between(queries, keys, device)});
  }
  if (size > 1 && window > 0) part.halo = halo_of(whole, rows, rank, size, window, device);
  return part;
}
}
