#include "engine/batches.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "core/random.h"

namespace pith {
namespace {

// Documents of one epoch in their order, with the token of the epoch at which each begins.
struct Epoch {
  std::vector<int64_t> documents, begins;  // begins has one more: the epoch's tokens
};

// Uniform integer below `bound`. The bias of not rejecting is bound / 2^64.
uint64_t below(uint64_t bound, const Philox4& random) {
  const auto wide = static_cast<uint64_t>(random.word[1]) << 32 | random.word[0];
  __extension__ using uint128 = unsigned __int128;
  return static_cast<uint64_t>(static_cast<uint128>(wide) * bound >> 64);
}

// Makes a tensor from a vector; on a GPU through pinned memory, so that the copy waits for nothing.
template <class T>
Tensor to_tensor(const std::vector<T>& values, at::ScalarType dtype, at::Device device) {
  Tensor tensor =
      at::empty({static_cast<int64_t>(values.size())}, at::TensorOptions().dtype(dtype));
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<T>());
  return device.is_cpu() ? tensor : tensor.pin_memory().to(device, /*non_blocking=*/true);
}

int64_t count_trained(const Row& row) {
  return static_cast<int64_t>(row.labels.size()) -
         std::count(row.labels.begin(), row.labels.end(), -100);
}

}  // namespace

struct RowStream::State {
  Corpus corpus;
  int64_t sequence_length;
  uint64_t seed;
  bool document_mask, shuffle;
  std::mutex mutex;  // guards the two epochs kept; a row needs more only in a tiny corpus
  std::map<int64_t, std::shared_ptr<const Epoch>> epochs;

  State(Corpus data, int64_t length, uint64_t order_seed, bool mask, bool shuffled)
      : corpus(std::move(data)),
        sequence_length(length),
        seed(order_seed),
        document_mask(mask),
        shuffle(shuffled) {}
  std::shared_ptr<const Epoch> epoch(int64_t number);
  int64_t shuffled_row(int64_t index) const;
};

// Rows that lie inside one epoch change places with each other; one that spans two epochs stays.
int64_t RowStream::State::shuffled_row(int64_t index) const {
  const int64_t tokens = corpus.num_tokens(), number = index * sequence_length / tokens;
  const int64_t first = (number * tokens + sequence_length - 1) / sequence_length;
  const int64_t end = (number + 1) * tokens / sequence_length;
  if (!shuffle || index < first || index >= end) return index;
  const uint64_t key = stream_key(seed, fmt::format("order of rows, epoch {}", number));
  return first + permuted(key, index - first, end - first);
}

std::shared_ptr<const Epoch> RowStream::State::epoch(int64_t number) {
  std::lock_guard lock(mutex);
  if (const auto found = epochs.find(number); found != epochs.end()) return found->second;
  auto made = std::make_shared<Epoch>();
  auto& order = made->documents;
  for (int64_t d = 0; d < corpus.num_documents(); ++d)
    if (corpus.length(d) > 0) order.push_back(d);
  // Fisher-Yates of our own: std::shuffle differs between standard libraries.
  const uint64_t key = stream_key(seed, fmt::format("order of documents, epoch {}", number));
  for (size_t i = order.size(); shuffle && i-- > 1;)
    std::swap(order[i], order[below(i + 1, philox(key, i))]);
  made->begins.reserve(order.size() + 1);
  made->begins.push_back(0);
  for (const int64_t d : order) made->begins.push_back(made->begins.back() + corpus.length(d));
  while (epochs.size() >= 2) {
    const bool first_is_farther = number - epochs.begin()->first > epochs.rbegin()->first - number;
    epochs.erase(first_is_farther ? epochs.begin() : std::prev(epochs.end()));
  }
  return epochs.emplace(number, std::move(made)).first->second;
}

RowStream::RowStream(Corpus corpus, int64_t sequence_length, uint64_t seed, bool document_mask,
                     bool shuffle) {
  PITH_CHECK(sequence_length > 0, "sequence length {} is not positive", sequence_length);
  PITH_CHECK(corpus.num_tokens() > 0, "corpus {} is empty", corpus.prefix());
  state_ =
      std::make_shared<State>(std::move(corpus), sequence_length, seed, document_mask, shuffle);
}

int64_t RowStream::rows_per_epoch() const {
  return state_->corpus.num_tokens() / state_->sequence_length;
}

Row RowStream::row(int64_t index) const {
  const int64_t length = state_->sequence_length, tokens = state_->corpus.num_tokens();
  int64_t start = 0;  // in the endless stream
  PITH_CHECK(index >= 0 && !__builtin_mul_overflow(index, length, &start) &&
                 start < std::numeric_limits<int64_t>::max() - length,
             "row {} of {} tokens is outside the stream", index, length);
  start = state_->shuffled_row(index) * length;
  Row row;
  row.tokens.reserve(static_cast<size_t>(length) + 1);
  row.labels.assign(static_cast<size_t>(length), -100);
  if (!state_->document_mask) row.document_begins.push_back(0);

  // Whole pieces of documents until there is one token more than the row has: the last label.
  int64_t number = start / tokens;
  auto epoch = state_->epoch(number);
  const auto after = std::upper_bound(epoch->begins.begin(), epoch->begins.end(), start % tokens);
  auto place = static_cast<size_t>(after - epoch->begins.begin() - 1);
  int64_t skipped = start % tokens - epoch->begins[place];  // of the first document, in rows before
  for (int64_t filled = 0; filled <= length; ++place, skipped = 0) {
    if (place == epoch->documents.size()) {
      epoch = state_->epoch(++number);
      place = 0;
    }
    const int64_t document = epoch->documents[place];
    const int64_t count = std::min(state_->corpus.length(document) - skipped, length + 1 - filled);
    row.tokens.resize(static_cast<size_t>(filled + count));
    state_->corpus.read(document, skipped,
                        std::span(row.tokens).subspan(static_cast<size_t>(filled)));
    if (state_->document_mask) {
      if (filled < length) row.document_begins.push_back(filled);
      for (int64_t i = filled; i + 1 < filled + count; ++i)
        row.labels[static_cast<size_t>(i)] = row.tokens[static_cast<size_t>(i + 1)];
    }
    for (int64_t i = 0; i < count && filled + i < length; ++i)
      row.positions.push_back(state_->document_mask ? i : filled + i);
    filled += count;
  }
  if (!state_->document_mask)
    std::copy(row.tokens.begin() + 1, row.tokens.end(), row.labels.begin());
  row.tokens.pop_back();
  return row;
}

MicroBatch make_microbatch(const std::vector<Row>& rows, bool document_mask,
                           int64_t global_trained_tokens, int64_t global_rows, at::Device device) {
  MicroBatch batch;
  std::vector<int64_t> tokens, labels;
  std::vector<int32_t> positions, row_id, cu_seqlens;
  for (const Row& row : rows) {
    const size_t size = row.tokens.size();
    PITH_CHECK(size > 0 && row.labels.size() == size && row.positions.size() == size &&
                   !row.document_begins.empty() && row.document_begins[0] == 0,
               "row {}: {} tokens, {} labels, {} positions, {} documents", batch.num_rows, size,
               row.labels.size(), row.positions.size(), row.document_begins.size());
    for (const int64_t begin : row.document_begins)
      if (document_mask || begin == 0)
        cu_seqlens.push_back(narrow<int32_t>(static_cast<int64_t>(tokens.size()) + begin));
    tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
    labels.insert(labels.end(), row.labels.begin(), row.labels.end());
    for (const int64_t position : row.positions) positions.push_back(narrow<int32_t>(position));
    row_id.insert(row_id.end(), size, narrow<int32_t>(batch.num_rows++));
    batch.trained_tokens += count_trained(row);
  }
  cu_seqlens.push_back(narrow<int32_t>(static_cast<int64_t>(tokens.size())));
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    PITH_CHECK(cu_seqlens[i] > cu_seqlens[i - 1], "document borders {} and {} are not in order",
               cu_seqlens[i - 1], cu_seqlens[i]);
    batch.max_seqlen = std::max<int64_t>(batch.max_seqlen, cu_seqlens[i] - cu_seqlens[i - 1]);
  }
  batch.tokens = to_tensor(tokens, at::kLong, device);
  batch.labels = to_tensor(labels, at::kLong, device);
  batch.positions = to_tensor(positions, at::kInt, device);
  batch.row_id = to_tensor(row_id, at::kInt, device);
  batch.cu_seqlens_host = to_tensor(cu_seqlens, at::kInt, at::kCPU);
  batch.cu_seqlens = to_tensor(cu_seqlens, at::kInt, device);
  batch.global_trained_tokens = global_trained_tokens;
  batch.global_rows = global_rows;
  return batch;
}

std::vector<MicroBatch> make_batch(const RowStream& stream, int64_t first, int64_t global_batch,
                                   int64_t micro_batch, bool document_mask, at::Device device) {
  const int64_t micro_batches = div_exact(global_batch, micro_batch);
  std::vector<std::vector<Row>> rows(static_cast<size_t>(micro_batches));
  int64_t trained = 0;
  for (int64_t i = 0; i < global_batch; ++i) {
    auto& group = rows[static_cast<size_t>(i / micro_batch)];
    group.push_back(stream.row(first + i));
    trained += count_trained(group.back());
  }
  std::vector<MicroBatch> batch;
  for (const auto& group : rows)
    batch.push_back(make_microbatch(group, document_mask, trained, global_batch, device));
  return batch;
}

}  // namespace pith
