// From corpora to micro-batches: a deterministic stream of rows and a cursor that is one integer.
#pragma once
#include "core/microbatch.h"
#include "engine/corpus.h"

namespace pith {
// A row of a batch before it becomes tensors.
struct Row {
  vector<int64_t> tokens, labels;
  vector<int64_t> positions; // restart at documents, unless document_mask is off
  vector<int64_t> document_begins; // indices into tokens; the first is 0
  int64_t padding = 0; // of the tokens, at the end; a document of its own

  int64_t trained_tokens() const { return ssize(labels) - ranges::count(labels, -100); }
};

// concat: documents joined and cut every sequence_length tokens; a row may hold the end of an epoch
// and the beginning of the next. best_fit (needs document_mask): whole rows are cut off long
// documents; what is left of each goes, longest first, into the row with the least room that holds
// it (best-fit decreasing; Ding et al. 2024, arXiv 2404.10830), then untrained padding with 0.
enum class Packing { concat, best_fit };

// The endless stream of one corpus, with `shuffle` each epoch's documents and rows in an order of
// its own. Every token is an input exactly once an epoch. Row i depends on the arguments and i
// alone. With document_mask labels never cross a document border (-100 there), and a document that
// goes on in another row starts there from position 0; without it a row is one document. Memory: 8
// bytes a document (best_fit) or 16 (concat), for two epochs.
class RowStream {
 public:
  RowStream(Corpus corpus, int64_t sequence_length, uint64_t seed, bool document_mask, bool shuffle,
    Packing packing = Packing::concat);
  Row row(int64_t index) const;
  int64_t trained_tokens(int64_t index) const; // of row(index), without reading tokens
  int64_t rows_per_epoch() const; // concat: whole ones, floor(tokens / sequence_length)
  const Corpus& corpus() const;
 private:
  struct State;
  shared_ptr<State> state_;
};

// Throws, naming both, where two corpora were made with different tokenizers or vocabularies, as
// far as side files say.
void check_same_tokenizer(const vector<Corpus>& corpora);

// Several streams mixed by weight: the source of row i depends on i alone, and over any prefix each
// source's count is within one of its share. Weights become integers (0.7 and 0.3: 7 and 3) whose
// sum, the period, is about 2^20 at most. Row j of a source of share w may take slots floor(j / w)
// to ceil((j + 1) / w) - 1; the earliest deadline goes first (Tijdeman 1980, "The chairman
// assignment problem").
class Blend {
 public:
  struct Place {
    size_t source;
    int64_t row; // of the source's own stream
  };
  Blend(vector<RowStream> sources, const vector<double>& weights);
  Blend(const RowStream& only) : Blend({only}, {1}) {} // implicit: a stream is a blend of one
  Place place(int64_t index) const;
  Row row(int64_t index) const {
    const auto [source, row] = place(index);
    return sources_[source].row(row);
  }
  int64_t trained_tokens(int64_t index) const {
    const auto [source, row] = place(index);
    return sources_[source].trained_tokens(row);
  }
  int64_t rows_before_repeat() const; // until a source would begin its second epoch
  const vector<RowStream>& sources() const { return sources_; }
  const vector<int64_t>& weights() const { return weights_; } // reduced integers
 private:
  vector<RowStream> sources_;
  vector<int64_t> weights_;
  vector<pair<uint32_t, uint32_t>> slots_; // of a period: source, its row in the period
};

// Rows from a JSON file (`pithtrain trace`): a list of rows, each a list of documents, each a list
// of ids in [0, vocab_size); or an object with such "rows" and "labels" (-100 = not trained).
// Without labels each token's is the next of its document, the last one's -100.
vector<Row> read_token_rows(const fs::path& path, int64_t vocab_size);

// Vectors as tensors on the CPU, and these on a device: the copy waits for nothing.
Tensor tensor_of(const vector<int64_t>& values, ScalarType dtype = kLong);
Tensor upload(const Tensor& host, Device device);

// Packs rows into one micro-batch on `device`. global_* counts are those of the whole batch.
MicroBatch make_microbatch(const vector<Row>& rows, bool document_mask,
  int64_t global_trained_tokens, int64_t global_rows, Device device);

// The part of rank dp_rank of dp_size in rows [first, first + global_batch): its micro-batch m of
// micro_batch rows begins at row (m * dp_size + dp_rank) * micro_batch.
vector<MicroBatch> make_batch(const Blend& rows, int64_t first, int64_t global_batch,
  int64_t micro_batch, int64_t dp_rank, int64_t dp_size, bool document_mask, Device device);

// The share of rank `rank` of `size` in `whole`, which lies on the CPU. Each row is cut into
// 2 size equal chunks (else an Error), of which it keeps numbers rank and 2 size - 1 - rank.
// Tokens, labels, positions, row_id and trained_tokens are then local, `ring` is filled, `halo` too
// for layers with this window, the rest is that of the unsplit rows.
MicroBatch split_context(
  const MicroBatch& whole, int64_t rank, int64_t size, Device device, int64_t window = 0);
}
