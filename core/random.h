// Random numbers that depend on (seed, tensor name, index) alone.
#pragma once
#include "core/philox.h"
#include "core/tensor.h"

namespace pith {
// Key for philox(): xxh3 of the name, seeded.
uint64_t stream_key(uint64_t seed, string_view name);

// `index` permuted in [0, size) without a table: four Feistel rounds over the next even number of
// bits, repeated while outside (cycle walking; Black and Rogaway 2002).
int64_t permuted(uint64_t key, int64_t index, int64_t size);

// Fills `out` (contiguous, any float dtype, CPU or CUDA) with std * N(0, 1). Element i is number
// first + i of the stream on any layout. CPU and CUDA differ by FP32 log, sin, cos (Box-Muller).
void fill_normal(Tensor& out, uint64_t seed, string_view name, double std, int64_t first = 0);
}
