#include "operators/swiglu.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tensor.h>

#include "tests/operators/gradient_check.h"

namespace pith::test {
namespace {

Tensor reference(const Tensor& gate_up) {
  const int64_t width = gate_up.size(1) / 2;
  const Tensor gate = gate_up.narrow(1, 0, width);
  return gate * at::sigmoid(gate) * gate_up.narrow(1, width, width);
}

TEST(SwiGlu, GradientsMatchFiniteDifferences) {
  const std::vector<std::vector<int64_t>> shapes = {{1, 2}, {3, 10}, {5, 2}, {0, 6}, {2, 38}};
  for (const auto& shape : shapes) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(shape, " ")));
    Tensor x = random_tensor("x", shape);
    check_gradients([&] { return swiglu(x); }, {x}, {});
    EXPECT_LE(max_difference(swiglu(x), reference(x)), 1e-14);
  }
}

TEST(SwiGlu, BFloat16IsRoundedOnce) {
  const Tensor x = random_tensor("x", {33, 2 * 77}, at::kBFloat16, 3.0).set_requires_grad(true);
  const Tensor dy = random_tensor("dy", {33, 77}, at::kBFloat16);
  const Tensor y = swiglu(x);
  y.backward(dy);
  const Tensor x64 = x.detach().to(at::kDouble).set_requires_grad(true);
  const Tensor y64 = reference(x64);
  y64.backward(dy.to(at::kDouble));
  const Tensor error = ((y.to(at::kDouble) - y64).abs() / y64.abs()).max();
  EXPECT_LE(error.item<double>(), 0x1p-8 * 1.01);
  EXPECT_LE(relative_difference(x.grad(), x64.grad()), 0x1p-8 * 1.01);
}

// Gates whose exponential over- or underflows: 0 and u, never NaN.
TEST(SwiGlu, ExtremeGates) {
  const Tensor x = at::tensor({-200.0f, 200.0f, -90.0f, 2.0f, 3.0f, 4.0f}).view({1, 6});
  x.set_requires_grad(true);
  const Tensor y = swiglu(x);
  y.sum().backward();
  EXPECT_LE(max_difference(y, at::tensor({0.0, 600.0, 0.0}).view({1, 3})), 1e-30);
  EXPECT_LE(
      max_difference(x.grad(), at::tensor({0.0, 3.0, 0.0, 0.0, 200.0, 0.0}).view({1, 6})), 1e-30);
}

TEST(SwiGlu, Refuses) {
  EXPECT_THROW(swiglu(random_tensor("x", {3, 5})), Error);
  EXPECT_THROW(swiglu(random_tensor("x", {4})), Error);
  EXPECT_THROW(swiglu(at::zeros_like(random_tensor("x", {3, 4}).to(at::kLong))), Error);
}

}  // namespace
}  // namespace pith::test
