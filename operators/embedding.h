#pragma once
#include "core/parameter.h"

namespace pith {
// tokens (T) int64 in [0, V), weight (V, H) -> (T, H) in the weight's dtype. Backward adds a
// token's rows into weight.grad, in FP32 and in the order of positions.
Tensor embedding(const Tensor& tokens, Parameter& weight);
}
