#include "engine/batches.h"

#include "core/random.h"

namespace pith {
namespace {

// One epoch's documents in their order.
struct Epoch {
  std::vector<int64_t> documents;
  // concat: the token of the epoch at which each document begins; one more: the epoch's tokens.
  // best_fit: the index into `documents` (or their ends) at which each row begins, and one more.
  std::vector<int64_t> begins;
  // best_fit: documents of at least a row, and the row with which the whole rows of each begin;
  // one more: how many such rows there are. They come before the rows of `begins`.
  std::vector<int64_t> long_documents, long_begins;

  int64_t whole_rows() const { return long_begins.back(); }
};

// A piece of a document inside a row.
struct Span {
  int64_t document, begin, count;
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

// Integers in the ratio of `weights`, without a common divisor, at least 1, sum at most kPeriod.
std::vector<int64_t> integer_weights(const std::vector<double>& weights) {
  constexpr int64_t kPeriod = 1 << 20;
  const double largest = *std::max_element(weights.begin(), weights.end());
  std::vector<int64_t> integers(weights.size());
  for (double scale = 1; scale <= 1e9 && largest * scale < 1e15; scale *= 10) {
    int64_t divisor = 0, sum = 0;
    bool exact = true;
    for (size_t s = 0; s < weights.size(); ++s) {
      const double scaled = weights[s] * scale;
      integers[s] = std::llround(scaled);
      exact = exact && integers[s] > 0 &&
              std::abs(scaled - static_cast<double>(integers[s])) < 1e-12 * scaled;
      divisor = std::gcd(divisor, integers[s]);
    }
    if (!exact) continue;
    for (int64_t& integer : integers) sum += integer /= divisor;
    if (sum <= kPeriod) return integers;
    break;
  }
  // Cumulated shares rounded: the integers add up to kPeriod, each is less than 1 off its share.
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double cumulated = 0;
  int64_t before = 0;
  for (size_t s = 0; s < weights.size(); ++s) {
    cumulated += weights[s];
    const int64_t now = std::llround(cumulated / total * kPeriod);
    integers[s] = std::max<int64_t>(1, now - std::exchange(before, now));
  }
  return integers;
}

}  // namespace

struct RowStream::State {
  Corpus corpus;
  int64_t sequence_length;
  uint64_t seed;
  bool document_mask, shuffle;
  Packing packing;
  int64_t packed_rows = 0;  // best_fit: rows of an epoch
  std::mutex mutex = {};    // guards the two epochs kept; a row needs more only in a tiny corpus
  std::pair<int64_t, std::shared_ptr<const Epoch>> epochs[2] = {};

  std::shared_ptr<const Epoch> epoch(int64_t number);
  void pack(Epoch& epoch) const;
  int64_t shuffled(int64_t index, int64_t epoch, int64_t first, int64_t end) const;
  std::vector<Span> spans(int64_t index);
  std::vector<Span> spans_concat(int64_t index);
  std::vector<Span> spans_best_fit(int64_t index);
};

// Rows [first, end) of an epoch change places with each other.
int64_t RowStream::State::shuffled(int64_t index, int64_t epoch, int64_t first, int64_t end) const {
  if (!shuffle || index < first || index >= end) return index;
  const uint64_t key = stream_key(seed, fmt::format("order of rows, epoch {}", epoch));
  return first + permuted(key, index - first, end - first);
}

std::shared_ptr<const Epoch> RowStream::State::epoch(int64_t number) {
  std::lock_guard lock(mutex);
  auto& kept = epochs[number % 2];
  if (kept.second && kept.first == number) return kept.second;
  auto made = std::make_shared<Epoch>();
  auto& order = made->documents;
  for (int64_t d = 0; d < corpus.num_documents(); ++d)
    if (corpus.length(d) > 0) order.push_back(d);
  // Fisher-Yates of our own: std::shuffle differs between standard libraries.
  const uint64_t key = stream_key(seed, fmt::format("order of documents, epoch {}", number));
  for (size_t i = order.size(); shuffle && i-- > 1;)
    std::swap(order[i], order[below(i + 1, philox(key, i))]);
  if (packing == Packing::best_fit) {
    pack(*made);
  } else {
    made->begins.reserve(order.size() + 1);
    made->begins.push_back(0);
    for (const int64_t d : order) made->begins.push_back(made->begins.back() + corpus.length(d));
  }
  kept = {number, std::move(made)};
  return kept.second;
}

// From the shuffled order of documents to rows. Documents of one length keep their shuffled order.
void RowStream::State::pack(Epoch& epoch) const {
  std::vector<std::pair<int64_t, int64_t>> ends;  // tokens beyond the whole rows; document
  epoch.long_begins.push_back(0);
  for (const int64_t d : epoch.documents) {
    const int64_t whole = corpus.length(d) / sequence_length;
    if (const int64_t end = corpus.length(d) % sequence_length; end > 0) ends.emplace_back(end, d);
    if (whole == 0) continue;
    epoch.long_documents.push_back(d);
    epoch.long_begins.push_back(epoch.long_begins.back() + whole);
  }
  std::stable_sort(
      ends.begin(), ends.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::map<int64_t, std::vector<int64_t>> open;  // rows by the room that they have left
  std::vector<int64_t> row_of(ends.size());
  epoch.begins.assign(1, 0);
  for (size_t i = 0; i < ends.size(); ++i) {
    int64_t room = sequence_length;
    if (const auto best = open.lower_bound(ends[i].first); best != open.end()) {
      room = best->first;
      row_of[i] = best->second.back();
      best->second.pop_back();
      if (best->second.empty()) open.erase(best);
    } else {
      row_of[i] = static_cast<int64_t>(epoch.begins.size()) - 1;
      epoch.begins.push_back(0);
    }
    ++epoch.begins[static_cast<size_t>(row_of[i]) + 1];
    if (room > ends[i].first) open[room - ends[i].first].push_back(row_of[i]);
  }
  std::partial_sum(epoch.begins.begin(), epoch.begins.end(), epoch.begins.begin());
  auto next = epoch.begins;
  epoch.documents.resize(ends.size());
  for (size_t i = 0; i < ends.size(); ++i)
    epoch.documents[static_cast<size_t>(next[static_cast<size_t>(row_of[i])]++)] = ends[i].second;
}

std::vector<Span> RowStream::State::spans(int64_t index) {
  int64_t end = 0;
  PITH_CHECK(index >= 0 && !__builtin_mul_overflow(index, sequence_length, &end) &&
                 end < std::numeric_limits<int64_t>::max() - sequence_length,
      "row {} of {} tokens is outside the stream", index, sequence_length);
  return packing == Packing::best_fit ? spans_best_fit(index) : spans_concat(index);
}

// Pieces of documents in the endless stream of tokens; without document_mask one token more, the
// last label.
std::vector<Span> RowStream::State::spans_concat(int64_t index) {
  const int64_t tokens = corpus.num_tokens();
  int64_t number = index * sequence_length / tokens;  // a row that spans two epochs stays in place
  const int64_t start =
      sequence_length * shuffled(index, number,
                            (number * tokens + sequence_length - 1) / sequence_length,
                            (number + 1) * tokens / sequence_length);
  auto current = epoch(number);
  const auto& begins = current->begins;
  const auto after = std::upper_bound(begins.begin(), begins.end(), start % tokens);
  auto place = static_cast<size_t>(after - begins.begin() - 1);
  int64_t skipped = start % tokens - begins[place];  // of the first document, in rows before
  std::vector<Span> spans;
  for (int64_t wanted = sequence_length + (document_mask ? 0 : 1); wanted > 0; ++place) {
    if (place == current->documents.size()) {
      current = epoch(++number);
      place = 0;
    }
    const int64_t document = current->documents[place];
    spans.push_back({document, skipped, std::min(corpus.length(document) - skipped, wanted)});
    wanted -= spans.back().count;
    skipped = 0;
  }
  return spans;
}

std::vector<Span> RowStream::State::spans_best_fit(int64_t index) {
  const int64_t number = index / packed_rows, first = number * packed_rows;
  const int64_t row = shuffled(index, number, first, first + packed_rows) - first;
  const auto current = epoch(number);
  if (row < current->whole_rows()) {
    const auto& begins = current->long_begins;
    const auto place = std::upper_bound(begins.begin(), begins.end(), row) - begins.begin() - 1;
    const int64_t before = row - begins[static_cast<size_t>(place)];  // rows of this document
    return {{current->long_documents[static_cast<size_t>(place)], before * sequence_length,
        sequence_length}};
  }
  std::vector<Span> spans;
  const auto place = static_cast<size_t>(row - current->whole_rows());
  for (int64_t i = current->begins[place]; i < current->begins[place + 1]; ++i) {
    const int64_t document = current->documents[static_cast<size_t>(i)];
    const int64_t count = corpus.length(document) % sequence_length;
    spans.push_back({document, corpus.length(document) - count, count});
  }
  return spans;
}

RowStream::RowStream(Corpus corpus, int64_t sequence_length, uint64_t seed, bool document_mask,
    bool shuffle, Packing packing) {
  PITH_CHECK(sequence_length > 0, "sequence length {} is not positive", sequence_length);
  PITH_CHECK(corpus.num_tokens() > 0, "corpus {} is empty", corpus.prefix());
  PITH_CHECK(packing == Packing::concat || document_mask, "best_fit packing needs document_mask");
  state_.reset(
      new State{std::move(corpus), sequence_length, seed, document_mask, shuffle, packing});
  if (packing == Packing::concat) return;
  const auto first = state_->epoch(0);
  state_->packed_rows = first->whole_rows() + static_cast<int64_t>(first->begins.size()) - 1;
}

int64_t RowStream::rows_per_epoch() const {
  return state_->packing == Packing::best_fit
             ? state_->packed_rows
             : state_->corpus.num_tokens() / state_->sequence_length;
}

double RowStream::padding_share() const {
  if (state_->packing == Packing::concat) return 0;
  return 1 - static_cast<double>(state_->corpus.num_tokens()) /
                 static_cast<double>(state_->packed_rows) /
                 static_cast<double>(state_->sequence_length);
}

const Corpus& RowStream::corpus() const { return state_->corpus; }

int64_t RowStream::trained_tokens(int64_t index) const {
  const auto spans = state_->spans(index);
  if (!state_->document_mask) return state_->sequence_length;
  int64_t trained = 0;
  for (const Span& span : spans)
    trained += std::min(span.count, state_->corpus.length(span.document) - span.begin - 1);
  return trained;
}

Row RowStream::row(int64_t index) const {
  const auto length = static_cast<size_t>(state_->sequence_length);
  Row row;
  row.tokens.reserve(length + 1);
  row.labels.reserve(length + 1);
  const auto add_positions = [&](size_t count) {
    row.document_begins.push_back(static_cast<int64_t>(row.positions.size()));
    for (size_t i = 0; i < count; ++i) row.positions.push_back(static_cast<int64_t>(i));
  };
  for (const Span& span : state_->spans(index)) {
    const size_t filled = row.tokens.size(), count = static_cast<size_t>(span.count);
    // With document_mask one token more where the document has it: the last label.
    const bool more =
        state_->document_mask && span.begin + span.count < state_->corpus.length(span.document);
    row.tokens.resize(filled + count + (more ? 1 : 0));
    state_->corpus.read(span.document, span.begin, std::span(row.tokens).subspan(filled));
    if (!state_->document_mask) continue;
    row.labels.insert(row.labels.end(), row.tokens.begin() + static_cast<ptrdiff_t>(filled) + 1,
        row.tokens.end());
    row.labels.resize(filled + count, -100);
    row.tokens.resize(filled + count);
    add_positions(count);
  }
  if (!state_->document_mask) {
    row.labels.assign(row.tokens.begin() + 1, row.tokens.end());
    row.tokens.pop_back();
    add_positions(length);
  } else if (row.tokens.size() < length) {
    add_positions(length - row.tokens.size());
    row.tokens.resize(length, 0);
    row.labels.resize(length, -100);
  }
  return row;
}

void check_same_tokenizer(const std::vector<Corpus>& corpora) {
  const Corpus* known = nullptr;
  for (const Corpus& corpus : corpora) {
    if (corpus.tokenizer_hash().empty() && corpus.vocab_size() == 0) continue;
    if (known == nullptr) known = &corpus;
    PITH_CHECK(corpus.tokenizer_hash() == known->tokenizer_hash() &&
                   corpus.vocab_size() == known->vocab_size(),
        "{} (vocabulary {}, tokenizer {}) and {} (vocabulary {}, tokenizer {}) cannot be used "
        "together: build both with the same tokenizer",
        known->prefix(), known->vocab_size(), known->tokenizer_hash(), corpus.prefix(),
        corpus.vocab_size(), corpus.tokenizer_hash());
  }
}

Blend::Blend(std::vector<RowStream> sources, const std::vector<double>& weights)
    : sources_(std::move(sources)) {
  PITH_CHECK(!sources_.empty() && sources_.size() == weights.size(),
      "a blend of {} sources with {} weights", sources_.size(), weights.size());
  for (size_t s = 0; s < weights.size(); ++s)
    PITH_CHECK(weights[s] > 0 && std::isfinite(weights[s]), "the weight of {} is {}",
        sources_[s].corpus().prefix(), weights[s]);
  weights_ = integer_weights(weights);
  const int64_t period = std::accumulate(weights_.begin(), weights_.end(), int64_t{0});
  std::vector<int64_t> done(weights_.size(), 0);
  slots_.reserve(static_cast<size_t>(period));
  for (int64_t slot = 0; slot < period; ++slot) {
    size_t chosen = 0;
    int64_t earliest = std::numeric_limits<int64_t>::max();
    for (size_t s = 0; s < weights_.size(); ++s) {
      if (done[s] * period >= (slot + 1) * weights_[s]) continue;  // not released yet
      const int64_t deadline = ((done[s] + 1) * period + weights_[s] - 1) / weights_[s];
      if (deadline < earliest) earliest = deadline, chosen = s;
    }
    slots_.emplace_back(static_cast<uint32_t>(chosen), static_cast<uint32_t>(done[chosen]++));
  }
}

Blend::Place Blend::place(int64_t index) const {
  PITH_CHECK(index >= 0, "row {} is outside the blend", index);
  const auto period = static_cast<int64_t>(slots_.size());
  const auto [source, row] = slots_[static_cast<size_t>(index % period)];
  return {source, index / period * weights_[source] + row};
}

Row Blend::row(int64_t index) const {
  const Place at = place(index);
  return sources_[at.source].row(at.row);
}

int64_t Blend::trained_tokens(int64_t index) const {
  const Place at = place(index);
  return sources_[at.source].trained_tokens(at.row);
}

int64_t Blend::rows_before_repeat() const {
  const auto period = static_cast<int64_t>(slots_.size());
  int64_t rows = std::numeric_limits<int64_t>::max();
  for (int64_t slot = 0; slot < period; ++slot) {
    const auto [source, row] = slots_[static_cast<size_t>(slot)];
    const int64_t left = sources_[source].rows_per_epoch() - row;  // whole periods before a repeat
    rows = std::min(rows,
        (std::max<int64_t>(0, left) + weights_[source] - 1) / weights_[source] * period + slot);
  }
  return rows;
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
    batch.trained_tokens += row.trained_tokens();
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

std::vector<MicroBatch> make_batch(const Blend& rows, int64_t first, int64_t global_batch,
    int64_t micro_batch, int64_t dp_rank, int64_t dp_size, bool document_mask, at::Device device) {
  PITH_CHECK(dp_rank >= 0 && dp_rank < dp_size, "data-parallel rank {} of {}", dp_rank, dp_size);
  const int64_t micro_batches = div_exact(global_batch, micro_batch * dp_size);
  int64_t trained = 0;
  for (int64_t i = 0; i < global_batch; ++i) trained += rows.trained_tokens(first + i);
  std::vector<MicroBatch> batch;
  for (int64_t m = 0; m < micro_batches; ++m) {
    std::vector<Row> own;
    for (int64_t i = 0; i < micro_batch; ++i)
      own.push_back(rows.row(first + (m * dp_size + dp_rank) * micro_batch + i));
    batch.push_back(make_microbatch(own, document_mask, trained, global_batch, device));
  }
  return batch;
}

}  // namespace pith
