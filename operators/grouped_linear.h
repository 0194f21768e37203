#pragma once
#include "core/parameter.h"
#include "operators/permute.h"
#include "operators/swiglu.h"

namespace pith {
// x (S, in) sorted by expert as in plan, weight (E, out, in) -> (S, out) in x's dtype: y[s] =
// weight[e] x[s] for slots s of expert e. Experts may be empty. Backward adds dy^T x of each into
// weight.grad in FP32, with no intermediate in the compute dtype.
Tensor grouped_linear(const Tensor& x, Parameter& weight, const ExpertPlan& plan);
// x weight + bias: with a bias (E, out), on Hopper added before rounding, and weight (E, in, out)
// (GPT-OSS).
Tensor grouped_affine(
  const Tensor& x, Parameter& weight, const Parameter& bias, const ExpertPlan& plan);

// rows (R, H) -> (S, out / 2): swiglu of grouped_linear, or, with a bias, of grouped_affine, of
// permute(rows, plan). Keeps rows and what swiglu keeps; on Hopper one kernel.
Tensor permuted_swiglu(const Tensor& rows, Parameter& weight, const ExpertPlan& plan,
  const SwigluForm& form = {}, const Parameter* bias = nullptr);
}
