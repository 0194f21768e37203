#include "operators/rms_norm.h"
#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rsqrt.h>
#include "tests/operators/gradient_check.h"

namespace pith::test {
namespace {
Tensor reference(const Tensor& x, const Tensor& weight, double eps) {
  return x * at::rsqrt((x * x).mean(-1, true) + eps) * weight;
}

TEST(RmsNorm, GradientsMatchFiniteDifferences) {
  const std::vector<std::vector<int64_t>> shapes = {
    {1}, {7}, {1, 1}, {3, 5}, {2, 17}, {0, 4}, {3, 2, 6}, {2, 3, 2, 4}, {40, 3}, {1, 70}};
  for (const auto& shape: shapes) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(shape, " ")));
    Tensor x = random_tensor("x", shape);
    Parameter w = make_parameter("w", {shape.back()}, at::kDouble, 0.3, 1.0);
    check_gradients([&] { return rms_norm(x, w, 1e-2); }, {x}, {&w});
    EXPECT_LE(max_difference(rms_norm(x, w, 1e-2), reference(x, w.value, 1e-2)), 1e-14);
  }
}

// Known fault 29: 1 + w is formed in FP32; in BF16 1.0038 would be 1.
TEST(RmsNorm, ZeroCentred) {
  Tensor x = random_tensor("x", {3, 5});
  Parameter w = make_parameter("w", {5}, at::kDouble, 0.3);
  check_gradients([&] { return rms_norm(x, w, 1e-2, true); }, {x}, {&w});
  EXPECT_LE(max_difference(rms_norm(x, w, 1e-2, true), reference(x, w.value + 1, 1e-2)), 1e-14);
  Parameter small = make_parameter("small", {2}, at::kBFloat16, 0, 0.0038);
  const Tensor y = rms_norm(at::full({1, 2}, 7.9, at::kBFloat16), small, 0, true);
  EXPECT_EQ(y[0][0].item<float>(), 1.0f); // 1.0038 rounds to 1, after the product
  const Tensor wide = at::full({1, 2}, 7.9, at::kFloat);
  Parameter same = make_parameter("same", {2}, at::kFloat, 0, 0.0038);
  EXPECT_NEAR(rms_norm(wide, same, 0, true)[0][0].item<float>(), 1.0038f, 1e-6f);
}

// The q and k heads of a fused projection (T, 3 heads, D) are normed where they lie.
TEST(RmsNorm, StridedViews) {
  Tensor fused = random_tensor("x", {5, 24});
  Parameter w = make_parameter("w", {6}, at::kDouble, 0.3, 1.0);
  const auto k_heads = [&] { return fused.view({5, 4, 6}).narrow(1, 1, 2); };
  check_gradients([&] { return rms_norm(k_heads(), w, 1e-6); }, {fused}, {&w});
  const auto columns = [&] { return fused.narrow(1, 7, 6); };
  check_gradients([&] { return rms_norm(columns(), w, 1e-6); }, {fused}, {&w});
  // A last dimension that is not contiguous is copied first.
  Tensor turned = random_tensor("y", {6, 5});
  check_gradients([&] { return rms_norm(turned.t(), w, 1e-6); }, {turned}, {&w});
}

// Statistics and product in FP32, one rounding: within half a BF16 unit (2^-8, relative) of FP64.
TEST(RmsNorm, BFloat16) {
  const Tensor x = random_tensor("x", {37, 131}, at::kBFloat16).set_requires_grad(true);
  Parameter w = make_parameter("w", {131}, at::kBFloat16, 0.3, 1.0);
  const Tensor dy = random_tensor("dy", {37, 131}, at::kBFloat16);
  const Tensor y = rms_norm(x, w, 1e-6);
  y.backward(dy);
  Tensor x64 = x.detach().to(at::kDouble).set_requires_grad(true);
  Tensor w64 = w.value.detach().to(at::kDouble).set_requires_grad(true);
  const Tensor y64 = reference(x64, w64, 1e-6);
  y64.backward(dy.to(at::kDouble));
  const Tensor error = ((y.to(at::kDouble) - y64).abs() / y64.abs()).max();
  EXPECT_LE(error.item<double>(), 0x1p-8 * 1.01);
  EXPECT_LE(relative_difference(x.grad(), x64.grad()), 0x1p-8);
  EXPECT_LE(relative_difference(w.grad, w64.grad()), 1e-5); // FP32 sums over 37 rows
}

// Large values don't overflow their squares' sum early, and in rows of zeros eps keeps the result
// finite.
TEST(RmsNorm, LargeAndZeroRows) {
  Parameter w = make_parameter("w", {64}, at::kFloat, 0.0, 1.0);
  const Tensor x = random_tensor("x", {1, 64}, at::kFloat);
  EXPECT_LE(relative_difference(rms_norm(x * 1e15, w, 1e-6), rms_norm(x, w, 0.0)), 1e-5);
  const Tensor zeros = at::zeros_like(x);
  EXPECT_EQ(rms_norm(zeros, w, 1e-6).abs().max().item<double>(), 0.0);
}

// Sums for dweight have one order, whatever the number of threads; enough rows for many blocks.
TEST(RmsNorm, WeightGradientRepeatsToTheBit) {
  const Tensor x = random_tensor("x", {4099, 3, 16}, at::kFloat);
  const Tensor dy = random_tensor("dy", {4099, 3, 16}, at::kFloat);
  Tensor first;
  for (int threads: {1, 2, 2}) {
    at::set_num_threads(threads);
    Parameter w = make_parameter("w", {16}, at::kFloat, 0.3, 1.0);
    rms_norm(x, w, 1e-6).backward(dy);
    if (!first.defined()) first = w.grad;
    EXPECT_TRUE(at::equal(w.grad, first)) << threads;
  }
  const Tensor x64 = x.to(at::kDouble);
  const Tensor normal = x64 * at::rsqrt((x64 * x64).mean(-1, true) + 1e-6);
  EXPECT_LE(relative_difference(first, (dy.to(at::kDouble) * normal).sum(0).sum(0)), 1e-5);
}

TEST(RmsNorm, Refuses) {
  Parameter w = make_parameter("model.norm.weight", {4});
  EXPECT_THROW(rms_norm(random_tensor("x", {3, 5}), w, 1e-6), Error);
  EXPECT_THROW(rms_norm(random_tensor("x", {3, 4}, at::kFloat), w, 1e-6), Error);
  EXPECT_THROW(rms_norm(Tensor(), w, 1e-6), Error);
}

} // namespace
} // namespace pith::test
