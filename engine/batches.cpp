#include "engine/batches.h"
#include <nlohmann/json.hpp>
#include "core/random.h"

namespace pith {
namespace {
using nlohmann::json;

// One epoch's documents in their order.
struct Epoch {
  vector<int64_t> documents;
  // concat: the token of the epoch at which each document begins; one more: the epoch's tokens.
  // best_fit: the index into `documents` (or their ends) at which each row begins, and one more.
  vector<int64_t> begins;
  // best_fit: documents of at least a row, and the row with which the whole rows of each begin;
  // one more: how many such rows there are. They come before the rows of `begins`.
  vector<int64_t> long_documents, long_begins;

  int64_t whole_rows() const { return long_begins.back(); }
};

// A piece of a document inside a row.
struct Span {
  int64_t document, begin, count;
};

// Uniform integer below `bound`. The bias of not rejecting is bound / 2^64.
uint64_t below(uint64_t bound, const Philox4& random) {
  const auto wide = uint64_t(random.word[1]) << 32 | random.word[0];
  __extension__ using uint128 = unsigned __int128;
  return uint64_t(static_cast<uint128>(wide) * bound >> 64);
}

// Which of the stretches that begin at these places, ascending, holds `at`.
size_t holder(const vector<int64_t>& begins, int64_t at) {
  return index(ranges::upper_bound(begins, at) - begins.begin() - 1);
}

// The least integers in the ratio of `weights`, each at least 1; rounded where their sum would be
// more than kPeriod.
vector<int64_t> integer_weights(const vector<double>& weights) {
  constexpr int64_t kPeriod = 1 << 20;
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  vector<int64_t> integers(weights.size());
  for (int64_t period = 1; period <= kPeriod; ++period) {
    bool exact = true;
    for (size_t s = 0; s < weights.size(); ++s) {
      const double share = weights[s] / total * real(period);
      integers[s] = max<int64_t>(1, std::llround(share));
      exact &= std::abs(share - real(integers[s])) < 1e-9;
    }
    if (exact) break;
  }
  return integers;
}
}

struct RowStream::State {
  Corpus corpus;
  int64_t sequence_length;
  uint64_t seed;
  bool document_mask, shuffle;
  Packing packing;
  int64_t packed_rows = 0; // best_fit: rows of an epoch
  std::mutex mutex = {}; // guards the two epochs kept; a row needs more only in a tiny corpus
  pair<int64_t, shared_ptr<const Epoch>> epochs[2] = {};

  // Rows [first, end) of an epoch change places with each other.
  int64_t shuffled(int64_t index, int64_t epoch, int64_t first, int64_t end) const {
    if (!shuffle || index < first || index >= end) return index;
    const uint64_t key = stream_key(seed, fmt::format("order of rows, epoch {}", epoch));
    return first + permuted(key, index - first, end - first);
  }

  shared_ptr<const Epoch> epoch(int64_t number) {
    lock_guard lock(mutex);
    auto& kept = epochs[number % 2];
    if (kept.second && kept.first == number) return kept.second;
    auto made = make_shared<Epoch>();
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
      for (const int64_t d: order) made->begins.push_back(made->begins.back() + corpus.length(d));
    }
    kept = {number, std::move(made)};
    return kept.second;
  }

  // From the shuffled order of documents to rows. Documents of one length keep that order.
  void pack(Epoch& epoch) const {
    vector<pair<int64_t, int64_t>> ends; // tokens beyond the whole rows; document
    epoch.long_begins.push_back(0);
    for (const int64_t d: epoch.documents) {
      const int64_t whole = corpus.length(d) / sequence_length;
      if (const int64_t end = corpus.length(d) % sequence_length; end > 0)
        ends.emplace_back(end, d);
      if (whole == 0) continue;
      epoch.long_documents.push_back(d);
      epoch.long_begins.push_back(epoch.long_begins.back() + whole);
    }
    ranges::stable_sort(ends, std::greater(), [](const auto& end) { return end.first; });
    map<int64_t, vector<int64_t>> open; // rows by the room that they have left
    vector<int64_t> row_of(ends.size());
    epoch.begins.assign(1, 0);
    for (size_t i = 0; i < ends.size(); ++i) {
      int64_t room = sequence_length;
      if (const auto best = open.lower_bound(ends[i].first); best != open.end()) {
        room = best->first;
        row_of[i] = best->second.back();
        best->second.pop_back();
        if (best->second.empty()) open.erase(best);
      } else {
        row_of[i] = ssize(epoch.begins) - 1;
        epoch.begins.push_back(0);
      }
      ++epoch.begins[index(row_of[i]) + 1];
      if (room > ends[i].first) open[room - ends[i].first].push_back(row_of[i]);
    }
    std::partial_sum(epoch.begins.begin(), epoch.begins.end(), epoch.begins.begin());
    auto next = epoch.begins;
    epoch.documents.resize(ends.size());
    for (size_t i = 0; i < ends.size(); ++i)
      epoch.documents[index(next[index(row_of[i])]++)] = ends[i].second;
  }

  vector<Span> spans(int64_t index) {
    return packing == Packing::best_fit ? spans_best_fit(index) : spans_concat(index);
  }

  // Pieces of documents in the endless stream of tokens; without document_mask one token more, the
  // last label.
  vector<Span> spans_concat(int64_t index) {
    const int64_t tokens = corpus.num_tokens();
    int64_t number = index * sequence_length / tokens; // a row of two epochs stays in place
    const int64_t first = (number * tokens + sequence_length - 1) / sequence_length;
    const int64_t start =
      sequence_length * shuffled(index, number, first, (number + 1) * tokens / sequence_length);
    auto current = epoch(number);
    size_t place = holder(current->begins, start % tokens);
    int64_t skipped = start % tokens - current->begins[place]; // in rows before
    vector<Span> spans;
    for (int64_t wanted = sequence_length + (document_mask ? 0 : 1); wanted > 0; ++place) {
      if (place == current->documents.size()) {
        current = epoch(++number);
        place = 0;
      }
      const int64_t document = current->documents[place];
      spans.push_back({document, skipped, min(corpus.length(document) - skipped, wanted)});
      wanted -= spans.back().count;
      skipped = 0;
    }
    return spans;
  }

  vector<Span> spans_best_fit(int64_t at) {
    const int64_t number = at / packed_rows, first = number * packed_rows;
    const int64_t row = shuffled(at, number, first, first + packed_rows) - first;
    const auto current = epoch(number);
    if (row < current->whole_rows()) {
      const size_t place = holder(current->long_begins, row);
      const int64_t before = row - current->long_begins[place]; // rows of this document
      return {{current->long_documents[place], before * sequence_length, sequence_length}};
    }
    vector<Span> spans;
    const auto place = index(row - current->whole_rows());
    for (int64_t i = current->begins[place]; i < current->begins[place + 1]; ++i) {
      const int64_t document = current->documents[index(i)];
      const int64_t count = corpus.length(document) % sequence_length;
      spans.push_back({document, corpus.length(document) - count, count});
    }
    return spans;
  }

  int64_t trained_tokens(int64_t index) {
    int64_t trained = 0;
    for (const Span& span: spans(index))
      trained += min(span.count, corpus.length(span.document) - span.begin - 1);
    return document_mask ? trained : sequence_length;
  }

  Row row(int64_t at) {
    Row row;
    // A document of `count` tokens from begin on: what is read there, its last label perhaps.
    const auto end_document = [&row](size_t begin, size_t count) {
      for (size_t i = begin + 1; i < row.tokens.size(); ++i) row.labels.push_back(row.tokens[i]);
      row.tokens.resize(begin + count, 0);
      row.labels.resize(begin + count, -100);
      row.document_begins.push_back(ssize(row.positions));
      for (size_t i = 0; i < count; ++i) row.positions.push_back(int64_t(i));
    };
    for (const auto& [document, begin, count]: spans(at)) {
      const size_t filled = row.tokens.size();
      const bool more = document_mask && begin + count < corpus.length(document);
      row.tokens.resize(filled + index(count) + (more ? 1 : 0));
      corpus.read(document, begin, span(row.tokens).subspan(filled));
      if (document_mask) end_document(filled, index(count));
    }
    const auto length = index(sequence_length);
    if (!document_mask) end_document(0, length);
    row.padding = sequence_length - ssize(row.tokens);
    if (row.padding > 0) end_document(row.tokens.size(), index(row.padding));
    return row;
  }
};

RowStream::RowStream(Corpus corpus, int64_t sequence_length, uint64_t seed, bool document_mask,
  bool shuffle, Packing packing) {
  PITH_CHECK(corpus.num_tokens() > 0, "corpus {} is empty", corpus.prefix());
  state_.reset(
    new State{std::move(corpus), sequence_length, seed, document_mask, shuffle, packing});
  if (packing == Packing::concat) return;
  const auto first = state_->epoch(0);
  state_->packed_rows = first->whole_rows() + ssize(first->begins) - 1;
}

int64_t RowStream::rows_per_epoch() const {
  return state_->packing == Packing::best_fit
    ? state_->packed_rows
    : state_->corpus.num_tokens() / state_->sequence_length;
}

const Corpus& RowStream::corpus() const { return state_->corpus; }
int64_t RowStream::trained_tokens(int64_t index) const { return state_->trained_tokens(index); }
Row RowStream::row(int64_t index) const { return state_->row(index); }

void check_same_tokenizer(const vector<Corpus>& corpora) {
  const Corpus* known = nullptr;
  for (const Corpus& corpus: corpora) {
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

Blend::Blend(vector<RowStream> sources, const vector<double>& weights)
    : sources_(std::move(sources)) {
  weights_ = integer_weights(weights);
  const int64_t period = std::accumulate(weights_.begin(), weights_.end(), int64_t{0});
  vector<int64_t> done(weights_.size(), 0);
  slots_.reserve(index(period));
  for (int64_t slot = 0; slot < period; ++slot) {
    size_t chosen = 0;
    int64_t earliest = numeric_limits<int64_t>::max();
    for (size_t s = 0; s < weights_.size(); ++s) {
      if (done[s] * period >= (slot + 1) * weights_[s]) continue; // not released yet
      const int64_t deadline = ((done[s] + 1) * period + weights_[s] - 1) / weights_[s];
      if (deadline < earliest) earliest = deadline, chosen = s;
    }
    slots_.emplace_back(uint32_t(chosen), uint32_t(done[chosen]++));
  }
}

Blend::Place Blend::place(int64_t at) const {
  const auto period = ssize(slots_);
  const auto [source, row] = slots_[index(at % period)];
  return {source, at / period * weights_[source] + row};
}

int64_t Blend::rows_before_repeat() const {
  const auto period = ssize(slots_);
  int64_t rows = numeric_limits<int64_t>::max();
  for (int64_t slot = 0; slot < period; ++slot) {
    const auto [source, row] = slots_[index(slot)];
    const int64_t left = sources_[source].rows_per_epoch() - row; // whole periods before a repeat
    rows =
      min(rows, (max<int64_t>(0, left) + weights_[source] - 1) / weights_[source] * period + slot);
  }
  return rows;
}

Tensor tensor_of(const vector<int64_t>& values, ScalarType dtype) {
  return at::tensor(at::ArrayRef<int64_t>(values)).to(dtype);
}
Tensor upload(const Tensor& host, Device device) {
  return device.is_cpu() ? host : host.pin_memory().to(device, /*non_blocking=*/true);
}

vector<Row> read_token_rows(const fs::path& path, int64_t vocab_size) {
  using Rows = vector<vector<vector<int64_t>>>;
  const json file = read_json(path);
  const bool labelled = file.is_object() && file.contains("labels");
  const auto rows = exactly<Rows>(file.is_object() ? file.value("rows", json()) : file);
  const auto labels = labelled ? exactly<Rows>(file["labels"]) : rows;
  PITH_CHECK(rows && labels && !rows->empty() && rows->size() == labels->size(),
    "{}: neither a list of rows, each a list of documents, each a list of ids, nor an object "
    "with such \"rows\" and as many \"labels\"",
    path);
  vector<Row> out(rows->size());
  for (size_t r = 0; r < out.size(); ++r) {
    const auto &documents = (*rows)[r], &its_labels = (*labels)[r];
    for (size_t d = 0; d < max<size_t>(documents.size(), 1); ++d) {
      const string place = fmt::format("{}: row {}, document {}", path, r, d);
      PITH_CHECK(documents.size() == its_labels.size() && d < documents.size() &&
          !documents[d].empty() && documents[d].size() == its_labels[d].size(),
        "{}: no ids, or not as many labels", place);
      const auto check = [&](int64_t id) {
        PITH_CHECK(id >= 0 && id < vocab_size, "{}: {} is not an id below the vocabulary of {}",
          place, id, vocab_size);
      };
      Row& row = out[r];
      row.document_begins.push_back(ssize(row.tokens));
      const auto& ids = documents[d];
      for (size_t i = 0; i < ids.size(); ++i) {
        const int64_t next = i + 1 < ids.size() ? ids[i + 1] : -100;
        const int64_t label = labelled ? its_labels[d][i] : next;
        check(ids[i]);
        if (label != -100) check(label);
        row.tokens.push_back(ids[i]);
        row.positions.push_back(int64_t(i));
        row.labels.push_back(label);
      }
    }
  }
  return out;
}

MicroBatch make_microbatch(const vector<Row>& rows, bool document_mask,
  int64_t global_trained_tokens, int64_t global_rows, Device device) {
  MicroBatch batch;
  vector<int64_t> tokens, labels, positions, row_id, cu_seqlens;
  for (const Row& row: rows) {
    const size_t size = row.tokens.size();
    for (const int64_t begin: row.document_begins)
      if (document_mask || begin == 0) cu_seqlens.push_back(ssize(tokens) + begin);
    tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
    labels.insert(labels.end(), row.labels.begin(), row.labels.end());
    positions.insert(positions.end(), row.positions.begin(), row.positions.end());
    row_id.insert(row_id.end(), size - index(row.padding), batch.num_rows);
    row_id.insert(row_id.end(), index(row.padding), ~batch.num_rows);
    ++batch.num_rows;
    batch.trained_tokens += row.trained_tokens();
  }
  cu_seqlens.push_back(narrow<int32_t>(ssize(tokens))); // the largest of all int32 numbers
  for (size_t i = 1; i < cu_seqlens.size(); ++i)
    batch.max_seqlen = max(batch.max_seqlen, cu_seqlens[i] - cu_seqlens[i - 1]);
  batch.tokens = upload(tensor_of(tokens), device);
  batch.labels = upload(tensor_of(labels), device);
  batch.positions = upload(tensor_of(positions, kInt), device);
  batch.row_id = upload(tensor_of(row_id, kInt), device);
  batch.cu_seqlens_host = tensor_of(cu_seqlens, kInt);
  batch.cu_seqlens = upload(batch.cu_seqlens_host, device);
  batch.global_trained_tokens = global_trained_tokens;
  batch.global_rows = global_rows;
  return batch;
}

vector<MicroBatch> make_batch(const Blend& rows, int64_t first, int64_t global_batch,
  int64_t micro_batch, int64_t dp_rank, int64_t dp_size, bool document_mask, Device device) {
  const int64_t micro_batches = div_exact(global_batch, micro_batch * dp_size);
  int64_t trained = 0;
  for (int64_t i = 0; i < global_batch; ++i) trained += rows.trained_tokens(first + i);
  vector<MicroBatch> batch;
  for (int64_t m = 0; m < micro_batches; ++m) {
    vector<Row> own;
    for (int64_t i = 0; i < micro_batch; ++i)
      own.push_back(rows.row(first + (m * dp_size + dp_rank) * micro_batch + i));
    batch.push_back(make_microbatch(own, document_mask, trained, global_batch, device));
  }
  return batch;
}
}
