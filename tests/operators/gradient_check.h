// Analytic gradients against central finite differences in FP64, for every element of every input
// and parameter of an operator. Provides check_gradients, random_tensor, make_parameter,
// max_difference.
#pragma once
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>
#include "core/parameter.h"
#include "core/random.h"
#include "tests/allocate.h"

namespace pith::test {

// N(0, std) of this shape; `name` chooses the numbers. Equal numbers, rounded, in every dtype.
inline Tensor random_tensor(std::string_view name, std::vector<int64_t> shape,
  at::ScalarType dtype = at::kDouble, double std = 1.0) {
  Tensor out = at::empty(shape, at::TensorOptions().dtype(dtype));
  fill_normal(out, 1, name, std);
  return out;
}

// A parameter on the CPU with value N(mean, std) and gradient 0; `name` chooses the numbers.
inline Parameter make_parameter(const std::string& name, std::vector<int64_t> shape,
  at::ScalarType dtype = at::kDouble, double std = 1.0, double mean = 0.0) {
  Parameter parameter(name, shape, ParameterGroup::matrix, Init::normal);
  allocate(parameter, dtype, at::kCPU);
  at::NoGradGuard no_grad;
  parameter.value.copy_(random_tensor(name, shape, at::kDouble, std) + mean);
  return parameter;
}

// max |a - b| over all elements, in FP64 on the CPU. 0 for empty tensors; NaN where either holds
// NaN.
inline double max_difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  if (a.numel() == 0 || a.sizes() != b.sizes()) return 0;
  const Tensor difference = a.detach().cpu().to(at::kDouble) - b.detach().cpu().to(at::kDouble);
  return difference.abs().max().item<double>();
}

// max |a - b| / max |b|.
inline double relative_difference(const Tensor& a, const Tensor& b) {
  if (b.numel() == 0) return max_difference(a, b);
  const double scale = b.detach().abs().max().to(at::kDouble).item<double>();
  return max_difference(a, b) / std::max(scale, 1e-30);
}

// Checks the gradients of `f` with respect to `inputs` (FP64 leaves on the CPU; they are made to
// require gradients) and `parameters` (FP64; gradient in .grad). `f` reads them anew in every call
// and returns one tensor. A scalar is the root of the backward itself (with gradient 1); another
// shape is first multiplied by fixed random numbers and summed. Gradient buffers start at 1, so
// that writing instead of adding is noticed. Error: |analytic - numeric| relative to the largest
// gradient of the tensor (at least 1e-3).
inline void check_gradients(const std::function<Tensor()>& f, std::vector<Tensor> inputs,
  const std::vector<Parameter*>& parameters, double tolerance = 1e-6, double step = 1e-5) {
  Tensor cotangent;
  const auto loss = [&]() -> Tensor {
    const Tensor y = f();
    EXPECT_EQ(y.scalar_type(), at::kDouble);
    if (y.dim() == 0) return y;
    if (!cotangent.defined()) cotangent = random_tensor("cotangent", y.sizes().vec());
    return (y * cotangent).sum();
  };
  for (Tensor& input: inputs) {
    ASSERT_EQ(input.scalar_type(), at::kDouble);
    input.set_requires_grad(true);
    input.mutable_grad() = Tensor();
  }
  for (Parameter* parameter: parameters) parameter->grad.fill_(1.0);
  loss().backward();

  const auto check = [&](const std::string& name, Tensor values, const Tensor& analytic) {
    at::NoGradGuard no_grad;
    ASSERT_TRUE(values.is_contiguous()) << name;
    ASSERT_EQ(analytic.sizes(), values.sizes()) << name;
    const Tensor numeric = at::zeros_like(values);
    double* x = values.data_ptr<double>();
    for (int64_t i = 0; i < values.numel(); ++i) {
      const double kept = x[i];
      x[i] = kept + step;
      const double above = loss().item<double>();
      x[i] = kept - step;
      const double below = loss().item<double>();
      x[i] = kept;
      numeric.data_ptr<double>()[i] = (above - below) / (2 * step);
    }
    const double scale =
      values.numel() == 0 ? 1 : std::max(numeric.abs().max().item<double>(), 1e-3);
    EXPECT_LE(max_difference(analytic, numeric) / scale, tolerance) << name;
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& grad = inputs[i].grad();
    check("input " + std::to_string(i), inputs[i].detach(),
      grad.defined() ? grad : at::zeros_like(inputs[i]));
  }
  for (Parameter* parameter: parameters) {
    EXPECT_FALSE(parameter->value.grad().defined()) << parameter->name << ": .grad() was allocated";
    check(parameter->name, parameter->value.detach(), parameter->grad - 1.0);
  }
}

} // namespace pith::test
