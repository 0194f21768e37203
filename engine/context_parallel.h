// Context parallelism: rows of a micro-batch cut over the ranks of Mesh::context.
#pragma once
#include "core/microbatch.h"

namespace pith {

// The share of member `rank` of `size` ranks of `whole`, which lies on the CPU, uploaded to
// `device`. Each row is cut into 2 size equal chunks, of which it keeps number rank and number
// 2 size - 1 - rank, in this order, row after row: causal work is equal for a document that fills
// its row. Throws where a row is not a multiple of 2 size tokens. Tokens, labels, positions, row_id
// and trained_tokens are then local, `ring` is filled, the rest is that of the unsplit rows.
// `window`: of the model's layers that have one (0: none), for `halo`.
MicroBatch split_context(
    const MicroBatch& whole, int64_t rank, int64_t size, at::Device device, int64_t window = 0);

// Pairs of query and key that each of `size` ranks computes in an attention layer. Short documents
// fall to ranks unevenly; the largest over the mean is how much longer the layer takes.
std::vector<int64_t> context_work(const MicroBatch& whole, int64_t size);

}  // namespace pith
