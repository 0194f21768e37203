// From a corpus to micro-batches: a deterministic stream of tokens and a cursor that is one
// integer.
#pragma once
#include <algorithm>
#include <vector>

#include "core/microbatch.h"
#include "engine/corpus.h"

namespace pith {

// A row of a batch before it becomes tensors: sequence_length tokens, their labels, and where
// documents begin.
struct Row {
  std::vector<int64_t> tokens, labels;
  std::vector<int64_t> positions;        // restart at documents, unless document_mask is off
  std::vector<int64_t> document_begins;  // indices into tokens; the first is 0

  int64_t trained_tokens() const {
    return std::count_if(labels.begin(), labels.end(), [](int64_t label) { return label != -100; });
  }
};

// The endless stream: epoch after epoch, each with its documents in an order shuffled by (seed,
// epoch), joined and cut every sequence_length tokens; the token after a row's last is its last
// label. Every token of every document is an input exactly once an epoch. Row i is a function of
// (corpus, seed, sequence_length, i) alone, so the batch does not depend on ranks or micro-batches
// and the cursor is the number of rows consumed. With shuffle, the rows inside an epoch change
// places as well, so that a long document does not fill a batch. With document_mask labels never
// cross a document border (-100 there), and a document that goes on in another row is a new span of
// attention there, from position 0; without it a row is one document. A corpus shorter than a row
// repeats in it.
class RowStream {
 public:
  RowStream(Corpus corpus, int64_t sequence_length, uint64_t seed, bool document_mask,
            bool shuffle);
  Row row(int64_t index) const;
  int64_t rows_per_epoch() const;  // floor(tokens / sequence_length)

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Packs rows into one micro-batch on `device`. global_* counts are those of the whole batch.
MicroBatch make_microbatch(const std::vector<Row>& rows, bool document_mask,
                           int64_t global_trained_tokens, int64_t global_rows, at::Device device);

// Rows [first, first + global_batch) of the stream as micro-batches of micro_batch rows, counts
// filled in.
std::vector<MicroBatch> make_batch(const RowStream& stream, int64_t first, int64_t global_batch,
                                   int64_t micro_batch, bool document_mask, at::Device device);

}  // namespace pith
