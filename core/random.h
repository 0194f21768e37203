// Random numbers that depend on (seed, tensor name, index) alone.
#pragma once
#include "core/philox.h"
#include "core/tensor.h"

namespace pith {

// Key of a named stream for philox(): xxh3 of the name, seeded.
uint64_t stream_key(uint64_t seed, std::string_view name);

// Place `index` of a permutation of [0, size) made without a table: four Feistel rounds over the
// next even number of bits, repeated while outside (cycle walking; Black and Rogaway 2002).
int64_t permuted(uint64_t key, int64_t index, int64_t size);

// Fills `out` (contiguous, any float dtype, CPU or CUDA) with std * N(0, 1). Element i holds number
// first + i of the stream, so a slice is that of the whole tensor on any layout. Box-Muller in
// FP32; CPU and CUDA differ by the rounding of log, sin, cos.
void fill_normal(Tensor& out, uint64_t seed, std::string_view name, double std, int64_t first = 0);

}
