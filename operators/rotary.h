// Rotary position embedding (Su et al. 2021, arXiv 2104.09864) with YaRN (arXiv 2309.00071).
#pragma once
#include "core/tensor.h"

namespace pith {
// Positions 0 .. P-1, computed in FP64, kept in FP32.
struct RotaryTable {
  Tensor cos, sin; // (P, D / 2) float32
};

// Frequencies that turn less than beta_slow times over the original positions are divided by
// `factor`, those above beta_fast kept, those between mixed.
struct Yarn {
  double factor = 1; // 1: plain frequencies
  double original_positions = 4096, beta_fast = 32, beta_slow = 1;
  bool truncate = true; // the mixed range's borders to whole frequencies
  double magnitude = 1; // of cos and sin
};
// 0.1 m ln(factor) + 1, or 1 where nothing is stretched: YaRN sharpens attention.
inline double yarn_mscale(double factor, double m) {
  return factor > 1 ? 0.1 * m * std::log(factor) + 1 : 1;
}

// theta^(-2i/D), i < D/2; `max_positions` rows.
RotaryTable make_rotary_table(
  int64_t max_positions, int64_t head_dim, double theta, Device device, const Yarn& yarn = {});

// Pair i of D elements: i and i + D/2 (Qwen, GPT-OSS), or 2i and 2i + 1 (DeepSeek).
enum class RotaryPairs { halves, neighbours };

// x (T, heads, ..), positions (T) int32 in [0, P) -> same shape and dtype: D elements of each head
// from `first` on are rotated, D that of the table, others copied. A pair (a, b) becomes (a cos - b
// sin, b cos + a sin), in FP32, rounded once. x may be a strided view, last dimension contiguous.
// Saves positions and table only. A position outside throws on the CPU; on CUDA its row is NaN.
Tensor rotary(const Tensor& x, const Tensor& positions, const RotaryTable& table,
  RotaryPairs pairs = RotaryPairs::halves, int64_t first = 0);
}
