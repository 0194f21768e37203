// Rotary position embedding, half-split layout (Su et al. 2021, arXiv 2104.09864; GPT-NeoX
// pairing).
#pragma once
#include "core/tensor.h"

namespace pith {

// Angles of positions 0 .. P-1, computed in FP64 and kept in FP32.
struct RotaryTable {
  Tensor cos, sin;  // (P, D / 2) float32
};

// Plain rotary frequencies theta^(-2i/D), i < D/2; `max_positions` rows on `device`.
RotaryTable make_rotary_table(
    int64_t max_positions, int64_t head_dim, double theta, at::Device device);

// x (T, heads, D), positions (T) int32 in [0, P) -> rotated x, same shape and dtype. Element i
// pairs with i + D/2: (a, b) -> (a cos - b sin, b cos + a sin), in FP32, rounded once. x may be a
// strided view whose last dimension is contiguous (a slice of a fused q, k, v projection). Backward
// turns by minus the angle; only positions and table are saved. A position outside the table throws
// on the CPU; on CUDA its row is NaN.
Tensor rotary(const Tensor& x, const Tensor& positions, const RotaryTable& table);

}  // namespace pith
