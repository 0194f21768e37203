#include "operators/linear.h"
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include "tests/operators/gradient_check.h"

namespace pith::test {
namespace {
struct Shape {
  int64_t tokens, in, out;
};
const Shape kShapes[] = {{1, 1, 1}, {1, 5, 3}, {2, 3, 7}, {7, 4, 2}, {0, 3, 2}, {3, 9, 1}};

TEST(Linear, GradientsMatchFiniteDifferences) {
  for (const Shape& s: kShapes) {
    SCOPED_TRACE(fmt::format("{} {} {}", s.tokens, s.in, s.out));
    Tensor x = random_tensor("x", {s.tokens, s.in});
    Parameter w = make_parameter("w", {s.out, s.in});
    check_gradients([&] { return linear(x, w); }, {x}, {&w});
    check_gradients([&] { return linear_fp32(x, w); }, {x}, {&w});
    EXPECT_LE(max_difference(linear(x, w), at::matmul(x, w.value.t())), 1e-14);
    Parameter b = make_parameter("b", {s.out});
    check_gradients([&] { return linear(x, w, &b); }, {x}, {&w, &b});
    check_gradients([&] { return linear_fp32(x, w, &b); }, {x}, {&w, &b});
    EXPECT_LE(max_difference(linear(x, w, &b), at::matmul(x, w.value.t()) + b.value), 1e-14);
  }
}

// The router's map keeps FP32 logits of BF16 inputs: the products are exact, only FP32 sums round.
TEST(Linear, Fp32ResultOfBFloat16) {
  const int64_t tokens = 33, in = 70, out = 12;
  const Tensor x = random_tensor("x", {tokens, in}, at::kBFloat16).set_requires_grad(true);
  Parameter w = make_parameter("w", {out, in}, at::kBFloat16);
  const Tensor x64 = x.detach().to(at::kDouble), w64 = w.value.detach().to(at::kDouble);
  const Tensor y = linear_fp32(x, w);
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_LE(relative_difference(y, x64.matmul(w64.t())), 1e-6);

  const Tensor dy = random_tensor("dy", {tokens, out}, at::kFloat);
  y.backward(dy);
  const Tensor dy64 = dy.to(at::kDouble);
  EXPECT_LE(relative_difference(w.grad, dy64.t().matmul(x64)), 1e-6);
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
  EXPECT_LE(relative_difference(x.grad(), dy64.matmul(w64)), 0x1p-8); // rounded once
}

TEST(Linear, BFloat16IsRoundedOnceAndItsWeightGradientNotAtAll) {
  const int64_t tokens = 65, in = 128, out = 31;
  const Tensor x = random_tensor("x", {tokens, in}, at::kBFloat16).set_requires_grad(true);
  Parameter w = make_parameter("w", {out, in}, at::kBFloat16);
  Parameter b = make_parameter("b", {out}, at::kBFloat16);
  const Tensor dy = random_tensor("dy", {tokens, out}, at::kBFloat16);
  const Tensor y = linear(x, w, &b);
  y.backward(dy);
  const Tensor x64 = x.detach().to(at::kDouble), w64 = w.value.detach().to(at::kDouble);
  const Tensor dy64 = dy.to(at::kDouble), b64 = b.value.detach().to(at::kDouble);
  EXPECT_LE(relative_difference(y, x64.matmul(w64.t()) + b64), 0x1p-8);
  EXPECT_LE(relative_difference(b.grad, dy64.sum(0)), 1e-6);
  EXPECT_LE(relative_difference(x.grad(), dy64.matmul(w64)), 0x1p-8);
  EXPECT_LE(relative_difference(w.grad, dy64.t().matmul(x64)), 1e-6);
  EXPECT_EQ(w.grad.scalar_type(), at::kFloat);
}

// The weight is trained although its input needs no gradient, and a frozen weight lets one through.
TEST(Linear, GradientsGoWhereTheyAreWanted) {
  Tensor x = random_tensor("x", {3, 4});
  Parameter w = make_parameter("w", {2, 4});
  linear(x, w).sum().backward();
  EXPECT_FALSE(x.grad().defined());
  EXPECT_GT(w.grad.abs().max().item<double>(), 0);
  EXPECT_FALSE(w.value.grad().defined());

  const Tensor before = w.grad.clone();
  w.value.set_requires_grad(false);
  x.set_requires_grad(true);
  linear(x, w).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_TRUE(at::equal(w.grad, before));

  w.value.set_requires_grad(true);
  at::NoGradGuard no_grad;
  EXPECT_FALSE(linear(x, w).requires_grad());
  EXPECT_TRUE(at::equal(w.grad, before));
}

TEST(Linear, Refuses) {
  Parameter w = make_parameter("model.layers.3.mlp.gate.weight", {2, 4});
  try {
    linear(random_tensor("x", {3, 5}), w);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what())
                .find("input of model.layers.3.mlp.gate.weight: float64 (3, 5) on cpu"),
      std::string::npos)
      << error.what();
  }
  EXPECT_THROW(linear(random_tensor("x", {3, 4}, at::kFloat), w), Error);
  EXPECT_THROW(linear_fp32(random_tensor("x", {12}), w), Error);
  EXPECT_THROW(linear(Tensor(), w), Error);
  Parameter b = make_parameter("b", {4});
  EXPECT_THROW(linear(random_tensor("x", {3, 4}), w, &b), Error);
}

} // namespace
} // namespace pith::test
