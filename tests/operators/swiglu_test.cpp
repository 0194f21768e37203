#include "operators/swiglu.h"
#include <ATen/ops/equal.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tensor.h>
#include "tests/operators/gradient_check.h"

namespace pith::test {
namespace {
SwigluForm clamped(double alpha, double limit) { return {float(alpha), float(limit), 1, true}; }

Tensor reference(const Tensor& gate_up) {
  const int64_t width = gate_up.size(1) / 2;
  const Tensor gate = gate_up.narrow(1, 0, width);
  return gate * at::sigmoid(gate) * gate_up.narrow(1, width, width);
}

TEST(SwiGlu, GradientsMatchFiniteDifferences) {
  const std::vector<std::vector<int64_t>> shapes = {{1, 2}, {3, 10}, {5, 2}, {0, 6}, {2, 38}};
  for (const auto& shape: shapes) {
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

// Known fault 28: the gate is clamped from above only, and a clamped value has no gradient.
TEST(SwiGlu, ClampedValues) {
  const Tensor x = at::tensor({8.0, -9.0, -10.0, 2.0, 1.0, 0.0}, at::kDouble).view({1, 6});
  x.set_requires_grad(true);
  const Tensor y = swiglu(x, clamped(1.702, 7.0));
  EXPECT_LE(
    max_difference(y, at::tensor({-41.99972, -1.21739e-6, 0.845796}, at::kDouble).view({1, 3})),
    1e-5);
  y.sum().backward();
  EXPECT_EQ(x.grad()[0][0].item<double>(), 0);
  EXPECT_EQ(x.grad()[0][1].item<double>(), 0);
  EXPECT_NE(x.grad()[0][2].item<double>(), 0);
}

TEST(SwiGlu, ClampedGradientsMatchFiniteDifferences) {
  for (const int64_t rows: {0, 1, 3, 7}) {
    Tensor x = random_tensor("x", {rows, 14});
    check_gradients([&] { return swiglu(x, clamped(1.5, 0.8)); }, {x}, {});
    const Tensor gate = x.detach().slice(1, 0, {}, 2).clamp_max(0.8);
    const Tensor up = x.detach().slice(1, 1, {}, 2).clamp(-0.8, 0.8);
    EXPECT_LE(
      max_difference(swiglu(x, clamped(1.5, 0.8)), (up + 1) * gate * at::sigmoid(gate * 1.5)),
      1e-6); // the limit is a float
  }
}

TEST(SwiGlu, ClampedBFloat16IsRoundedOnce) {
  const Tensor x = random_tensor("x", {33, 2 * 77}, at::kBFloat16, 3.0).set_requires_grad(true);
  const Tensor dy = random_tensor("dy", {33, 77}, at::kBFloat16);
  const Tensor y = swiglu(x, clamped(1.702, 2.5));
  y.backward(dy);
  const Tensor x64 = x.detach().to(at::kDouble).set_requires_grad(true);
  const Tensor y64 = swiglu(x64, clamped(1.702, 2.5));
  y64.backward(dy.to(at::kDouble));
  EXPECT_LE(relative_difference(y, y64), 0x1p-8);
  EXPECT_LE(relative_difference(x.grad(), x64.grad()), 0x1p-8 * 1.01);
}

TEST(SwiGlu, Refuses) {
  EXPECT_THROW(swiglu(random_tensor("x", {3, 5})), Error);
  EXPECT_THROW(swiglu(random_tensor("x", {4})), Error);
  EXPECT_THROW(swiglu(random_tensor("x", {3, 4}), clamped(1.7, 0)), Error);
  EXPECT_THROW(swiglu(at::zeros_like(random_tensor("x", {3, 4}).to(at::kLong))), Error);
}

} // namespace
} // namespace pith::test
