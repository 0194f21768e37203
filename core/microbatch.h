// The unit of work that flows through the pipeline: packed rows of tokens.
#pragma once
#include "core/tensor.h"

namespace pith {
// Borders of documents in packed (T, ...) tensors: document d has queries cu_q[d] .. cu_q[d+1] and
// keys cu_k[d] .. cu_k[d+1]: the same in training, more keys while decoding.
struct AttentionSpan {
  Tensor cu_q, cu_k; // (D + 1) int32 on the compute device
  Tensor cu_q_host, cu_k_host; // the same on the CPU
  int64_t max_q = 0, max_k = 0; // longest document in each
};

// Rows of a (T, ...) tensor: neighbours from `first` on, or those in `index` where defined.
struct RowSet {
  int64_t first = 0, count = 0;
  Tensor index; // (count) int64 on the compute device, ascending
};

// Step i of ring attention on rank r: which of its queries meet which keys of rank (r - i) mod C;
// documents that have both. Step 0 is causal, later every query sees every key.
struct RingStep {
  RowSet queries, keys;
  AttentionSpan span;
};

// S slots that hold rows of R, and for each row its slots.
struct Gather {
  Tensor row_of_slot; // (S) int32: the row in this slot
  Tensor slot_of; // (R, K) int32: slots, or -1
  int64_t num_slots() const { return row_of_slot.size(0); }
};

// What layers with a window need on a context-parallel rank: keys of its tokens and of those before
// each of its chunks that the window reaches, from their holders (itself, too).
struct Halo {
  int64_t window = 0; // 0: there is none
  Gather sent; // of own tokens, for one rank after another
  vector<int64_t> send, received; // their numbers, to and from each rank
  Gather keys; // of what is received, in the order of `span`
  AttentionSpan span; // documents cut at chunks; the last keys are the queries'
};

// One packed row set; T tokens on this context-parallel rank. A row is one training sequence of one
// or more documents. Attention and positions stop at documents; the balance loss counts per row. On
// the compute device unless stated. Labels, positions, borders: made before split_context.
struct MicroBatch {
  Tensor tokens; // (T) int64
  Tensor labels; // (T) int64, the next token; -100 is not trained
  Tensor positions; // (T) int32, position inside the unsplit document
  Tensor cu_seqlens; // (D + 1) int32, document borders of the unsplit rows
  Tensor row_id; // (T) int32, ascending; ~row for padding at its end
  Tensor cu_seqlens_host; // on the CPU: no kernel waits for a copy
  vector<RingStep> ring; // one a context-parallel rank; empty where rows are whole
  Halo halo; // where rows are not whole and the model has windows
  int64_t num_rows = 0;
  int64_t max_seqlen = 0; // longest document
  int64_t trained_tokens = 0; // labels != -100 among these tokens

  // Of the whole global batch, equal in its micro-batches: losses are divided by these.
  int64_t global_trained_tokens = 0;
  int64_t global_rows = 0;

  int64_t num_tokens() const { return tokens.size(0); }
};
}
