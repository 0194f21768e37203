#include "operators/muon.h"
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include "tests/operators/error_text.h"
#include "tests/operators/gradient_check.h"

namespace pith::test {
namespace {
const std::vector<std::vector<int64_t>> kShapes = {
  {3, 1, 17}, {1, 1, 1}, {2, 8, 8}, {1, 24, 32}, {2, 13, 61}, {1, 96, 100}, {1, 64, 512}};

double frobenius_error(const Tensor& got, const Tensor& wanted) {
  const Tensor exact = wanted.to(at::kDouble);
  return ((got.to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

// The iteration of the paper, a matrix at a time, by other operations than the operator's.
Tensor iterate(const Tensor& x) {
  Tensor y = x / (x.norm() + 1e-7);
  for (int step = 0; step < 5; ++step) {
    const Tensor a = y.mm(y.t());
    y = y * 3.4445 + (a * -4.7750 + a.mm(a) * 2.0315).mm(y);
  }
  return y;
}

TEST(NewtonSchulz, FollowsThePaperInFp64) {
  for (const auto& shape: kShapes) {
    const Tensor x = random_tensor("x", shape), y = newton_schulz(x, 3.0);
    for (int64_t i = 0; i < shape[0]; ++i)
      EXPECT_LT(frobenius_error(y[i], iterate(x[i]) * 3.0), 1e-13) << shape[1] << " " << shape[2];
  }
}

TEST(NewtonSchulz, Fp32AgreesWithFp64) {
  for (const auto& shape: kShapes) {
    const Tensor x = random_tensor("x", shape, at::kFloat, 1e-3);
    const Tensor y = newton_schulz(x);
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_LT(frobenius_error(y, newton_schulz(x.to(at::kDouble))), 1e-5)
      << shape[1] << " " << shape[2];
  }
}

// Each of the 16 roundings, half a unit of 2^-8, may turn a singular vector.
TEST(NewtonSchulz, Bf16AgreesWithFp32WithinItsRounding) {
  for (const auto& shape: kShapes) {
    const Tensor x = random_tensor("x", shape, at::kBFloat16);
    const Tensor y = newton_schulz(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_LT(frobenius_error(y, newton_schulz(x.to(at::kFloat))), 16 * 0x1p-9)
      << shape[1] << " " << shape[2];
  }
}

// Singular values near 1, the vectors those of x.
TEST(NewtonSchulz, MakesMatricesNearlyOrthogonal) {
  for (const auto& shape: std::vector<std::vector<int64_t>>{{2, 1, 9}, {2, 16, 64}, {1, 24, 40}}) {
    const Tensor x = random_tensor("x", shape), y = newton_schulz(x);
    const auto [u, s, vh] = at::linalg_svd(y, /*full_matrices=*/false);
    EXPECT_GT(s.min().item<double>(), 0.6);
    EXPECT_LT(s.max().item<double>(), 1.3);
    const auto [ux, sx, vx] = at::linalg_svd(x, /*full_matrices=*/false);
    const Tensor inside = ux.transpose(1, 2).bmm(y).bmm(vx.transpose(1, 2)); // diagonal
    EXPECT_LT(max_difference(inside, inside * at::eye(shape[1], inside.options())), 1e-10);
  }
}

TEST(NewtonSchulz, ScaleOfTheInputDoesNotMatterAndZeroStaysZero) {
  const Tensor x = random_tensor("x", {1, 6, 20});
  EXPECT_LT(frobenius_error(newton_schulz(x * 1e4), newton_schulz(x)), 1e-6);
  EXPECT_EQ(newton_schulz(at::zeros_like(x)).abs().max().item<double>(), 0);
  EXPECT_THROW(newton_schulz(x.transpose(1, 2)), Error);
  EXPECT_THROW(newton_schulz(x[0]), Error);
}

// Nesterov's momentum and decoupled decay, in FP64; parts of any size give the bits of the whole.
TEST(Muon, MomentumAndUpdate) {
  const int64_t n = 1003;
  Tensor momentum = at::zeros({n}), expected = at::zeros({n}, at::kDouble);
  Tensor in_parts = at::zeros({n}), rounded = at::zeros({n}, at::kBFloat16);
  Tensor direction = at::zeros({n}), parts = at::zeros({n}), of_rounded = at::zeros({n});
  const Tensor scale = at::scalar_tensor(0.5f);
  for (int step = 1; step <= 4; ++step) {
    const Tensor grad = random_tensor("g" + std::to_string(step), {n}, at::kFloat);
    muon_momentum(momentum, grad, scale, 0.95, direction);
    muon_momentum(rounded, grad, scale, 0.95, of_rounded);
    for (const auto& [begin, end]: {std::pair(0, 1), {1, 517}, {517, 1003}}) {
      Tensor part = in_parts.slice(0, begin, end);
      muon_momentum(part, grad.slice(0, begin, end), scale, 0.95, parts.slice(0, begin, end));
    }
    expected = expected * 0.95 + grad.to(at::kDouble) * 0.5;
    const Tensor nesterov = expected * 0.95 + grad.to(at::kDouble) * 0.5;
    EXPECT_LT(frobenius_error(momentum, expected), 1e-6);
    EXPECT_LT(frobenius_error(direction, nesterov), 1e-6);
    EXPECT_LT(frobenius_error(of_rounded, nesterov), 0x1p-8);
    EXPECT_TRUE(at::equal(parts, direction) && at::equal(in_parts, momentum));
  }
  Tensor master = at::ones({n}), value = at::empty({n}, at::kBFloat16);
  muon_update(master, direction, value, 0.01, 0.1);
  EXPECT_LT(frobenius_error(master, 0.999 - direction.to(at::kDouble) * 0.01), 1e-6);
  EXPECT_TRUE(at::equal(value, master.to(at::kBFloat16)));
}

} // namespace
} // namespace pith::test
