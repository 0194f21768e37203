#pragma once
#include "core/parameter.h"
#include "operators/permute.h"

namespace pith {
// x (S, in) sorted by expert as in plan, weight (E, out, in) -> (S, out) in x's dtype: y[s] =
// weight[e] x[s] for slots s of expert e. Experts may be empty. Backward adds dy^T x of each into
// weight.grad in FP32, with no intermediate in the compute dtype.
Tensor grouped_linear(const Tensor& x, Parameter& weight, const ExpertPlan& plan);
// Of permute(rows, plan), which is not kept; on Hopper only the backward makes it.
Tensor permuted_linear(const Tensor& rows, Parameter& weight, const ExpertPlan& plan);

// With a bias (E, out), on Hopper added before rounding, and weight (E, in, out) (GPT-OSS): x
// weight
// + bias.
Tensor grouped_affine(
    const Tensor& x, Parameter& weight, const Parameter& bias, const ExpertPlan& plan);
Tensor permuted_affine(
    const Tensor& rows, Parameter& weight, const Parameter& bias, const ExpertPlan& plan);
}
