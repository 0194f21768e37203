// An operator on CUDA against itself on the CPU in FP64, on the same inputs. Provides check_on_gpu,
// poison, expect_close.
#pragma once
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include "tests/operators/gradient_check.h"

namespace pith::test {

inline const at::Device kGpu(at::kCUDA, 0);

// Fills memory that the allocator will hand out next with NaN: an element that no kernel writes is
// noticed.
inline void poison() {
  std::vector<Tensor> blocks;
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(kGpu);
  for (int i = 0; i < 16; ++i) blocks.push_back(at::full({1 << 19}, 0xFF, bytes));
  for (int i = 0; i < 4; ++i) blocks.push_back(at::full({1 << 24}, 0xFF, bytes));
}

// |got - exact| <= half a unit of got's dtype at that value + noise * (largest exact value): the
// result of FP32 arithmetic, rounded once. NaN fails. Where the exact values vanish (queries that
// see one key have no gradient) what is left is the rounding of terms of size 1, which is then the
// scale.
inline void expect_close(
  const Tensor& got, const Tensor& exact, double noise, const std::string& name) {
  ASSERT_EQ(got.sizes(), exact.sizes()) << name;
  if (got.numel() == 0) return;
  const Tensor wanted = exact.detach().to(at::kDouble), size = wanted.abs();
  const double half_unit = got.scalar_type() == at::kBFloat16 ? 0x1p-8 : 0x1p-24;
  const double largest = size.max().item<double>(), scale = largest > 1e-9 ? largest : 1;
  const Tensor error = (got.detach().cpu().to(at::kDouble) - wanted).abs();
  const Tensor excess = (error - size * half_unit).max() / scale;
  EXPECT_LE(excess.item<double>(), noise) << name;
}

// f(inputs, parameters) -> one tensor. It runs on the CPU in FP64 and on CUDA in FP32 and BF16, on
// inputs, weights and output gradients that the dtype holds exactly; results and all gradients are
// compared. On CUDA it runs twice, on poisoned memory, for the same bits. Integer inputs stay as
// they are.
using Operator = std::function<Tensor(const std::vector<Tensor>&, std::vector<Parameter>&)>;

struct Outcome {
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
};

inline Outcome run_operator(const Operator& f, const std::vector<Tensor>& inputs,
  const std::vector<Tensor>& values, at::ScalarType dtype, at::Device device,
  const Tensor& cotangent) {
  std::vector<Tensor> arguments;
  for (const Tensor& input: inputs) {
    const bool floating = at::isFloatingType(input.scalar_type());
    Tensor argument =
      input.detach().to(device, floating ? dtype : input.scalar_type(), false, true);
    argument.set_requires_grad(floating);
    arguments.push_back(argument);
  }
  std::vector<Parameter> parameters;
  for (size_t i = 0; i < values.size(); ++i) {
    parameters.emplace_back("parameter " + std::to_string(i), values[i].sizes().vec(),
      ParameterGroup::matrix, Init::normal);
    allocate(parameters.back(), dtype, device);
    parameters.back().value.detach().copy_(values[i]);
    parameters.back().grad.fill_(0.5);
  }
  const Tensor y = f(arguments, parameters);
  if (y.requires_grad()) y.backward(cotangent.to(device, y.scalar_type()));
  Outcome outcome{{"output"}, {y.detach()}};
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].requires_grad()) continue;
    outcome.names.push_back("gradient of input " + std::to_string(i));
    outcome.tensors.push_back(arguments[i].grad());
  }
  for (const Parameter& parameter: parameters) {
    outcome.names.push_back("gradient of " + parameter.name);
    outcome.tensors.push_back(parameter.grad);
  }
  return outcome;
}

inline void check_on_gpu(const Operator& f, const std::vector<Tensor>& inputs,
  const std::vector<Tensor>& values, double noise = 1e-5) {
  for (at::ScalarType dtype: {at::kFloat, at::kBFloat16}) {
    SCOPED_TRACE(dtype_name(dtype));
    const auto rounded = [&](const std::vector<Tensor>& tensors) {
      std::vector<Tensor> result;
      for (const Tensor& t: tensors)
        result.push_back(at::isFloatingType(t.scalar_type()) ? t.to(dtype) : t);
      return result;
    };
    const std::vector<Tensor> x = rounded(inputs), w = rounded(values);
    Tensor like; // shape and dtype of the result
    {
      at::NoGradGuard no_grad;
      like = run_operator(f, x, w, dtype, at::kCPU, {}).tensors[0];
    }
    const Tensor cotangent = random_tensor("cotangent", like.sizes().vec(), like.scalar_type());
    const Outcome exact = run_operator(f, x, w, at::kDouble, at::kCPU, cotangent);
    poison();
    const Outcome first = run_operator(f, x, w, dtype, kGpu, cotangent);
    const Outcome second = run_operator(f, x, w, dtype, kGpu, cotangent);
    ASSERT_EQ(first.tensors.size(), exact.tensors.size());
    for (size_t i = 0; i < exact.tensors.size(); ++i) {
      ASSERT_EQ(first.tensors[i].defined(), exact.tensors[i].defined()) << exact.names[i];
      if (!exact.tensors[i].defined()) continue;
      expect_close(first.tensors[i], exact.tensors[i], noise, exact.names[i]);
      EXPECT_TRUE(at::equal(first.tensors[i], second.tensors[i])) << exact.names[i] << " repeats";
    }
  }
}

} // namespace pith::test
