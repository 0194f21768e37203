// One linear map per expert over rows sorted by expert.
#pragma once
#include "core/parameter.h"
#include "operators/permute.h"

namespace pith {

// x (S, in) sorted by expert as in plan, weight (E, out, in) -> (S, out) in x's dtype: y[s] =
// weight[e] x[s] for the slots s of expert e. Experts may be empty. Backward adds each expert's
// dy^T x into weight.grad in FP32 without an intermediate in the compute dtype.
Tensor grouped_linear(const Tensor& x, Parameter& weight, const ExpertPlan& plan);

// The same with a bias (E, out) for each expert, added to the rounded product, and the weight as
// (E, in, out), which is how GPT-OSS keeps it: y[s] = x[s] weight[e] + bias[e].
Tensor grouped_affine(
    const Tensor& x, Parameter& weight, const Parameter& bias, const ExpertPlan& plan);
// Of permute(rows, plan), which is made again in the backward instead of kept.
Tensor permuted_affine(
    const Tensor& rows, Parameter& weight, const Parameter& bias, const ExpertPlan& plan);

}
