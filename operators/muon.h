// Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; scaled as Liu et al. 2025,
// arXiv 2502.16982): momentum, made orthogonal matrix by matrix.
#pragma once
#include "core/tensor.h"

namespace pith {
// Flat (n): exp_avg = momentum * exp_avg + g with g = grad_scale * grad, and the direction by
// Nesterov, momentum * exp_avg + g. grad and grad_scale (scalar) float32, exp_avg float32 or
// bfloat16 (rounded after use), direction any float dtype. On the CPU all may be FP64.
void muon_momentum(
  Tensor& exp_avg, const Tensor& grad, const Tensor& grad_scale, double momentum, Tensor direction);

// x (B, n, m), n <= m -> scale * U V^T of each matrix's singular vectors, nearly: five steps of
// Newton-Schulz (quintic, 3.4445 - 4.7750 + 2.0315) bring singular values above 1e-2 of the
// Frobenius norm to 0.68 .. 1.14. Products summed in FP32 (FP64 for FP64), rounded to x's dtype. 10
// n^2 (2 m + n) floating-point operations a matrix.
Tensor newton_schulz(const Tensor& x, double scale = 1);

// Flat (n): master -= rate * (weight_decay * master + update); value: master, rounded.
void muon_update(
  Tensor& master, const Tensor& update, Tensor& value, double rate, double weight_decay);
}
