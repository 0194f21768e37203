#include "operators/adamw.h"
#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include "tests/operators/gradient_check.h"

namespace pith::test {
namespace {
struct State {
  Tensor master, exp_avg, exp_avg_sq, value;
};

State make_state(int64_t n, at::ScalarType dtype, at::ScalarType value_dtype) {
  State s;
  s.master = random_tensor("master", {n}, dtype);
  s.exp_avg = at::zeros_like(s.master);
  s.exp_avg_sq = at::zeros_like(s.master);
  s.value = s.master.clone().to(value_dtype);
  return s;
}

void update(State& s, const Tensor& grad, double grad_scale, const AdamWStep& step) {
  const Tensor scale = at::scalar_tensor(grad_scale, s.master.options());
  adamw_update(s.master, s.exp_avg, s.exp_avg_sq, grad, s.value, scale, step);
}

// Algorithm 2 of the paper, term by term, in FP64.
TEST(AdamW, FollowsThePaper) {
  for (at::ScalarType dtype: {at::kDouble, at::kFloat}) {
    SCOPED_TRACE(dtype_name(dtype));
    State s = make_state(101, dtype, dtype);
    Tensor w = s.master.clone().to(at::kDouble), m = at::zeros_like(w), v = at::zeros_like(w);
    AdamWStep step{3e-2, 0.9, 0.95, 1e-8, 0.1, 0};
    for (step.step = 1; step.step <= 7; ++step.step) {
      step.learning_rate *= 0.9;
      const Tensor grad = random_tensor("grad" + std::to_string(step.step), {101}, dtype);
      update(s, grad, 0.25, step);
      const Tensor g = grad.to(at::kDouble) * 0.25;
      const auto t = static_cast<double>(step.step);
      m = 0.9 * m + 0.1 * g;
      v = 0.95 * v + 0.05 * g * g;
      const Tensor m_hat = m / (1 - std::pow(0.9, t)), v_hat = v / (1 - std::pow(0.95, t));
      w = w - step.learning_rate * (m_hat / (v_hat.sqrt() + 1e-8) + 0.1 * w);
    }
    // The paper subtracts both terms from the old weight; here, as in PyTorch, the weight decays
    // first: the second term is the same, so only rounding remains.
    const double tolerance = dtype == at::kDouble ? 1e-13 : 2e-6;
    EXPECT_LE(max_difference(s.master, w), tolerance);
    EXPECT_LE(max_difference(s.exp_avg, m), tolerance);
    EXPECT_LE(max_difference(s.exp_avg_sq, v), tolerance);
    EXPECT_TRUE(at::equal(s.value, s.master));
  }
}

// Updates far below a BF16 unit of the weight arrive: the master moves, the rounded value follows.
TEST(AdamW, SmallUpdatesReachTheMaster) {
  State s;
  s.master = at::ones({3});
  s.exp_avg = at::zeros_like(s.master);
  s.exp_avg_sq = at::zeros_like(s.master);
  s.value = s.master.to(at::kBFloat16);
  const Tensor grad = at::ones({3});
  for (int64_t i = 1; i <= 100; ++i) update(s, grad, 1.0, {6e-4, 0.9, 0.95, 0.0, 0.0, i});
  EXPECT_NEAR(s.master[0].item<double>(), 0.94, 1e-5);
  EXPECT_TRUE(at::equal(s.value, s.master.to(at::kBFloat16)));
}

// Decoupled decay: without gradients lr * wd = 0.01 shrinks a weight by 0.99 a step; wd = 0 leaves
// it.
TEST(AdamW, WeightDecayAlone) {
  State decayed = make_state(50, at::kFloat, at::kBFloat16);
  State kept = make_state(50, at::kFloat, at::kBFloat16);
  const Tensor start = decayed.master.clone(), grad = at::zeros_like(start);
  for (int64_t i = 1; i <= 10; ++i) {
    update(decayed, grad, 1.0, {0.1, 0.9, 0.95, 1e-8, 0.1, i});
    update(kept, grad, 1.0, {0.1, 0.9, 0.95, 1e-8, 0.0, i});
  }
  EXPECT_LE(relative_difference(decayed.master, start.to(at::kDouble) * std::pow(0.99, 10)), 1e-6);
  EXPECT_TRUE(at::equal(kept.master, start));
}

// Moments in BF16 are those of FP32 rounded after each step; computed with unrounded.
TEST(AdamW, Bf16MomentsAreRoundedAfterUse) {
  State wide = make_state(1003, at::kFloat, at::kBFloat16);
  State half = make_state(1003, at::kFloat, at::kBFloat16);
  half.exp_avg = half.exp_avg.to(at::kBFloat16);
  half.exp_avg_sq = half.exp_avg_sq.to(at::kBFloat16);
  for (int64_t i = 1; i <= 4; ++i) {
    const Tensor grad = random_tensor("grad" + std::to_string(i), {1003}, at::kFloat);
    wide.exp_avg = half.exp_avg.to(at::kFloat);
    wide.exp_avg_sq = half.exp_avg_sq.to(at::kFloat);
    update(wide, grad, 0.5, {1e-2, 0.9, 0.95, 1e-8, 0.1, i});
    update(half, grad, 0.5, {1e-2, 0.9, 0.95, 1e-8, 0.1, i});
    EXPECT_TRUE(at::equal(half.master, wide.master));
    EXPECT_TRUE(at::equal(half.exp_avg, wide.exp_avg.to(at::kBFloat16)));
    EXPECT_TRUE(at::equal(half.exp_avg_sq, wide.exp_avg_sq.to(at::kBFloat16)));
  }
}

// A step cut into shards of any size gives the same bits as the whole.
TEST(AdamW, ShardsEqualTheWhole) {
  State whole = make_state(40'001, at::kFloat, at::kBFloat16);
  State parts = make_state(40'001, at::kFloat, at::kBFloat16);
  const Tensor grad = random_tensor("grad", {40'001}, at::kFloat);
  const AdamWStep step{1e-3, 0.9, 0.95, 1e-8, 0.1, 1};
  update(whole, grad, 0.5, step);
  for (int64_t begin: {0, 1, 17'002}) {
    const int64_t end = begin == 0 ? 1 : begin == 1 ? 17'002 : 40'001;
    const auto cut = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
    State part{cut(parts.master), cut(parts.exp_avg), cut(parts.exp_avg_sq), cut(parts.value)};
    update(part, cut(grad), 0.5, step);
  }
  EXPECT_TRUE(at::equal(whole.master, parts.master));
  EXPECT_TRUE(at::equal(whole.value, parts.value));
}

TEST(AdamW, Refuses) {
  State s = make_state(4, at::kFloat, at::kBFloat16);
  const Tensor grad = random_tensor("grad", {4}, at::kFloat);
  const AdamWStep step{1e-3, 0.9, 0.95, 1e-8, 0.1, 1};
  EXPECT_THROW(update(s, grad.narrow(0, 0, 3), 1.0, step), Error);
  EXPECT_THROW(update(s, grad.to(at::kBFloat16), 1.0, step), Error);
  EXPECT_THROW(update(s, grad, 1.0, {1e-3, 0.9, 0.95, 1e-8, 0.1, 0}), Error);
  State half = make_state(4, at::kFloat, at::kBFloat16);
  half.exp_avg = half.exp_avg.to(at::kBFloat16); // and exp_avg_sq in FP32
  EXPECT_THROW(update(half, grad, 1.0, step), Error);
}

// 2^24 + 1 cannot be counted in FP32; FP64 sums keep every square.
TEST(SumOfSquares, AccumulatesInFp64) {
  const Tensor x = at::ones({(1 << 24) + 3});
  const Tensor sum = sum_of_squares(x);
  EXPECT_EQ(sum.scalar_type(), at::kDouble);
  EXPECT_EQ(sum.item<double>(), (1 << 24) + 3);
  EXPECT_EQ(sum_of_squares(at::empty({0})).item<double>(), 0.0);
}

TEST(SumOfSquares, SameBitsForAnyNumberOfThreads) {
  const Tensor x = random_tensor("x", {100'003}, at::kFloat);
  at::set_num_threads(1);
  const double one = sum_of_squares(x).item<double>();
  at::set_num_threads(2);
  EXPECT_EQ(sum_of_squares(x).item<double>(), one);
  const Tensor y = x.to(at::kDouble);
  EXPECT_NEAR(one, (y * y).sum().item<double>(), 1e-9 * one);
  EXPECT_NEAR(sum_of_squares(y).item<double>(), one, 1e-9 * one);
  EXPECT_THROW(sum_of_squares(x.to(at::kBFloat16)), Error);
}

} // namespace
} // namespace pith::test
