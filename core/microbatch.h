// The unit of work that flows through the pipeline: packed rows of tokens.
#pragma once
#include "core/tensor.h"

namespace pith {

// One packed row set; T tokens on this context-parallel rank. A row is one training sequence; it
// holds one or more documents. Attention and positions stop at documents, the balance loss is
// counted per row. All tensors lie on the compute device except where stated.
struct MicroBatch {
  Tensor tokens;           // (T) int64
  Tensor labels;           // (T) int64, the token to predict at each position; -100 is not trained
  Tensor positions;        // (T) int32, position inside the unsplit document
  Tensor cu_seqlens;       // (D + 1) int32, document borders of the unsplit rows
  Tensor row_id;           // (T) int32, row of each token, 0 .. num_rows - 1
  Tensor cu_seqlens_host;  // the same borders as cu_seqlens, on the CPU: no kernel waits for a copy
  int64_t num_rows = 0;
  int64_t max_seqlen = 0;      // longest document
  int64_t trained_tokens = 0;  // labels != -100 in this micro-batch

  // Counts of the whole global batch, equal in all its micro-batches: losses are divided by these.
  int64_t global_trained_tokens = 0;
  int64_t global_rows = 0;

  int64_t num_tokens() const { return tokens.size(0); }
};

}  // namespace pith
