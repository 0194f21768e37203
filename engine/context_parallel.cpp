#include "engine/context_parallel.h"

#include "engine/batches.h"

namespace pith {
namespace {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// First token of each unsplit row, and the end of the last.
std::vector<int64_t> row_borders(const MicroBatch& whole, int64_t size) {
  check_shape(whole.row_id, "split_context: row_id", {whole.num_tokens()});
  PITH_CHECK(whole.row_id.is_cpu() && whole.ring.empty(),
      "split_context takes an unsplit micro-batch on the CPU");
  const int32_t* row = whole.row_id.const_data_ptr<int32_t>();
  std::vector<int64_t> borders(static_cast<size_t>(whole.num_rows) + 1, 0);
  for (int64_t t = 0; t < whole.num_tokens(); ++t)
    borders.at(static_cast<size_t>(row[t] < 0 ? ~row[t] : row[t]) + 1) = t + 1;
  for (size_t i = 0; i + 1 < borders.size(); ++i) {
    if ((borders[i + 1] - borders[i]) % (2 * size) == 0) continue;
    PITH_FAIL_HINT(fmt::format("choose a sequence length that is a multiple of {}", 2 * size),
        "row {} has {} tokens: {} context-parallel ranks cut rows into {} equal chunks", i,
        borders[i + 1] - borders[i], size, 2 * size);
  }
  return borders;
}

// Calls f(queries, keys) for each document with queries on `rank` that see keys of `peer`: its
// local tokens that take part. On the same rank both are all that it has there, and causal; a rank
// before this one gives its low chunk, and to ranks after this one only the high chunk's queries
// come later.
template <class F>
void for_each_piece(const MicroBatch& whole, const std::vector<int64_t>& rows, int64_t rank,
    int64_t peer, int64_t size, F&& f) {
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

// The queries or the keys of a ring step, document after document.
struct Side {
  std::vector<int64_t> index, cu{0};
  int64_t longest = 0;

  void add(const Range& range) {
    for (int64_t t = range.begin; t < range.end; ++t) index.push_back(t);
    cu.push_back(std::ssize(index));
    longest = std::max(longest, range.size());
  }
  RowSet rows(at::Device device) const {
    if (index.empty()) return {};
    RowSet set{index.front(), std::ssize(index), {}};
    const bool neighbours = index.back() - index.front() + 1 == set.count;  // ascending
    if (!neighbours) set.index = upload(tensor_of(index), device);
    return set;
  }
};

// Calls f(first key, first query, end) for each document with tokens in a chunk of `rank`, in the
// order of its local tokens; positions in the unsplit rows.
template <class F>
void for_each_window(const MicroBatch& whole, const std::vector<int64_t>& rows, int64_t rank,
    int64_t size, int64_t window, F&& f) {
  const int32_t* cu = whole.cu_seqlens_host.const_data_ptr<int32_t>();
  const int64_t documents = whole.cu_seqlens_host.numel() - 1;
  int64_t d = 0;
  for (size_t row = 0; row + 1 < rows.size(); ++row) {
    const int64_t chunk = (rows[row + 1] - rows[row]) / (2 * size);
    for (const int64_t number : {rank, 2 * size - 1 - rank}) {
      const int64_t begin = rows[row] + number * chunk, end = begin + chunk;
      while (d < documents && cu[d + 1] <= begin) ++d;
      for (int64_t i = d; i < documents && cu[i] < end; ++i) {
        const int64_t first = std::max<int64_t>(begin, cu[i]), last = std::min<int64_t>(end, cu[i + 1]);
        if (first < last) f(std::max<int64_t>(cu[i], first - window + 1), first, last);
      }
    }
  }
}

// Where a position of the unsplit rows is: the rank and the local token.
std::pair<int64_t, int64_t> place_of(
    const std::vector<int64_t>& rows, int64_t position, int64_t size) {
  const auto row = std::ranges::upper_bound(rows, position) - 1;
  const int64_t chunk = (row[1] - row[0]) / (2 * size), number = (position - *row) / chunk;
  const bool high = number >= size;
  return {high ? 2 * size - 1 - number : number,
      *row / size + (high ? chunk : 0) + (position - *row) % chunk};
}

Gather gather_of(const std::vector<int64_t>& from, int64_t rows, at::Device device) {
  std::vector<std::vector<int32_t>> places(static_cast<size_t>(rows));
  size_t most = 1;
  for (size_t i = 0; i < from.size(); ++i) {
    auto& its = places.at(static_cast<size_t>(from[i]));
    its.push_back(narrow<int32_t>(i));
    most = std::max(most, its.size());
  }
  const Tensor table = at::full({rows, static_cast<int64_t>(most)}, -1, at::TensorOptions(at::kInt));
  for (size_t row = 0; row < places.size(); ++row)
    std::ranges::copy(places[row], table.mutable_data_ptr<int32_t>() + row * most);
  return {upload(at::tensor(at::ArrayRef<int64_t>(from)).to(at::kInt), device),
      upload(table, device)};
}

Halo halo_of(const MicroBatch& whole, const std::vector<int64_t>& rows, int64_t rank, int64_t size,
    int64_t window, at::Device device) {
  const int64_t tokens = rows.back() / size;
  Halo halo;
  halo.window = window;
  halo.send.assign(static_cast<size_t>(size), 0);
  halo.received = halo.send;
  // Calls f(owner, local token) for what `member` needs of other ranks.
  const auto for_each_fetched = [&](int64_t member, auto&& f) {
    for_each_window(whole, rows, member, size, window, [&](int64_t key, int64_t query, int64_t) {
      for (; key < query; ++key)
        if (const auto [owner, token] = place_of(rows, key, size); owner != member) f(owner, token);
    });
  };
  std::vector<int64_t> sent, keys;
  for (int64_t member = 0; member < size; ++member)
    for_each_fetched(member, [&](int64_t owner, int64_t token) {
      if (owner != rank) return;
      sent.push_back(token);
      ++halo.send[static_cast<size_t>(member)];
    });
  for_each_fetched(
      rank, [&](int64_t owner, int64_t) { ++halo.received[static_cast<size_t>(owner)]; });
  std::vector<int64_t> next(static_cast<size_t>(size));  // the place of the next row of each rank
  std::exclusive_scan(halo.received.begin(), halo.received.end(), next.begin(), tokens);
  Side queries;  // their numbers are not needed, only the borders
  std::vector<int32_t> borders{0};
  int64_t longest = 0;
  for_each_window(whole, rows, rank, size, window, [&](int64_t key, int64_t query, int64_t end) {
    longest = std::max(longest, end - key);
    const int64_t first = place_of(rows, query, size).second;
    queries.add({first, first + end - query});
    for (; key < query; ++key) {
      const auto [owner, token] = place_of(rows, key, size);
      keys.push_back(owner == rank ? token : next[static_cast<size_t>(owner)]++);
    }
    for (; key < end; ++key) keys.push_back(first + key - query);
    borders.push_back(narrow<int32_t>(std::ssize(keys)));
  });
  halo.sent = gather_of(sent, tokens, device);
  halo.keys = gather_of(keys, std::reduce(halo.received.begin(), halo.received.end(), tokens), device);
  const Tensor cu_q = queries.borders(), cu_k = at::tensor(at::ArrayRef<int32_t>(borders));
  halo.span = {upload(cu_q, device), upload(cu_k, device), cu_q, cu_k, queries.longest, longest};
  return halo;
}

}  // namespace

MicroBatch split_context(const MicroBatch& whole, int64_t rank, int64_t size, at::Device device,
    int64_t window) {
  const auto rows = row_borders(whole, size);
  std::vector<int64_t> kept;
  for (size_t i = 0; i + 1 < rows.size(); ++i) {
    const int64_t chunk = (rows[i + 1] - rows[i]) / (2 * size);
    for (const int64_t number : {rank, 2 * size - 1 - rank})
      for (int64_t t = 0; t < chunk; ++t) kept.push_back(rows[i] + number * chunk + t);
  }
  MicroBatch part = whole;
  for (Tensor* tensor : {&part.tokens, &part.labels, &part.positions, &part.row_id})
    *tensor = tensor->index_select(0, tensor_of(kept));
  part.trained_tokens = part.labels.ne(-100).sum().item<int64_t>();
  part.cu_seqlens = whole.cu_seqlens_host;
  for (Tensor* tensor :
      {&part.tokens, &part.labels, &part.positions, &part.row_id, &part.cu_seqlens})
    *tensor = upload(*tensor, device);
  for (int64_t i = 0; size > 1 && i < size; ++i) {
    Side queries, keys;
    for_each_piece(whole, rows, rank, (rank + size - i) % size, size,
        [&](const Range& q, const Range& k) { queries.add(q), keys.add(k); });
    const Tensor cu_q = tensor_of(queries.cu, at::kInt), cu_k = tensor_of(keys.cu, at::kInt);
    part.ring.push_back({queries.rows(device), keys.rows(device),
        {upload(cu_q, device), upload(cu_k, device), cu_q, cu_k, queries.longest, keys.longest}});
  }
  if (size > 1 && window > 0) part.halo = halo_of(whole, rows, rank, size, window, device);
  return part;
}

std::vector<int64_t> context_work(const MicroBatch& whole, int64_t size) {
  const auto rows = row_borders(whole, size);
  std::vector<int64_t> work(static_cast<size_t>(size), 0);
  for (int64_t rank = 0; rank < size; ++rank)
    for (int64_t peer = 0; peer < size; ++peer)
      for_each_piece(whole, rows, rank, peer, size, [&](const Range& q, const Range& k) {
        const int64_t causal = q.size() * (q.size() + 1) / 2;
        work[static_cast<size_t>(rank)] += peer == rank ? causal : q.size() * k.size();
      });
  return work;
}

}  // namespace pith
