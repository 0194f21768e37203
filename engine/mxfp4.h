// MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats that share a scale by 32.
#pragma once
#include "core/tensor.h"

namespace pith {

// blocks (..., G, 16) uint8, two numbers a byte, the low four bits first: sign, two bits of
// exponent, one of mantissa; scales (..., G) uint8: powers of two, 127 is 1, 255 is NaN.
// -> (..., 32 G) float32, exact, as it is in bfloat16 where it does not overflow.
Tensor dequantize_mxfp4(const Tensor& blocks, const Tensor& scales);

}  // namespace pith
