#include "core/random.h"
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <cmath>

namespace pith {
namespace {
// The known answers published with Random123: (counter, key) -> four words.
TEST(Random, PhiloxKnownAnswers) {
  struct Case {
    Philox4 counter;
    uint64_t key;
    Philox4 expected;
  };
  const Case cases[] = {
    {{{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
    {{{~0u, ~0u, ~0u, ~0u}}, ~uint64_t{0}, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
    {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822,
      {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const Case& c: cases) {
    const Philox4 got = philox_4x32_10(c.counter, c.key);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], c.expected.word[i]);
  }
  EXPECT_EQ(philox(0, 0).word[3], 0x9b00dbd8u);
}

TEST(Random, KeysDependOnSeedAndName) {
  EXPECT_EQ(stream_key(1, "a"), stream_key(1, "a"));
  EXPECT_NE(stream_key(1, "a"), stream_key(2, "a"));
  EXPECT_NE(stream_key(1, "a"), stream_key(1, "b"));
}

// A slice equals the same slice of the whole, wherever it begins and ends in a block of four.
TEST(Random, SlicesAgreeWithTheWhole) {
  Tensor whole = at::empty({100'003}, at::kFloat);
  fill_normal(whole, 7, "w", 0.02);
  for (int64_t first: {0, 1, 2, 3, 4, 77, 16'383, 50'001}) {
    for (int64_t n: {0, 1, 2, 3, 5, 17'001}) {
      Tensor part = at::empty({n}, at::kFloat);
      fill_normal(part, 7, "w", 0.02, first);
      EXPECT_TRUE(at::equal(part, whole.narrow(0, first, n))) << first << " " << n;
    }
  }
}

TEST(Random, BFloat16IsTheRoundedFloat32) {
  Tensor fp32 = at::empty({1001}, at::kFloat), bf16 = at::empty({1001}, at::kBFloat16);
  fill_normal(fp32, 7, "w", 0.02);
  fill_normal(bf16, 7, "w", 0.02);
  EXPECT_TRUE(at::equal(bf16, fp32.to(at::kBFloat16)));
}

// Moments and tails of 4 million numbers against the normal distribution, at 5 standard errors.
TEST(Random, IsNormal) {
  const int64_t n = 1 << 22;
  Tensor x = at::empty({n}, at::kFloat);
  fill_normal(x, 3, "moments", 1.0);
  const Tensor y = x.to(at::kDouble);
  const double root_n = std::sqrt(static_cast<double>(n));
  EXPECT_NEAR(y.mean().item<double>(), 0.0, 5 / root_n);
  EXPECT_NEAR((y * y).mean().item<double>(), 1.0, 5 * std::sqrt(2.0) / root_n);
  EXPECT_NEAR((y * y * y).mean().item<double>(), 0.0, 5 * std::sqrt(15.0) / root_n);
  EXPECT_NEAR((y * y * y * y).mean().item<double>(), 3.0, 5 * std::sqrt(96.0) / root_n);
  const double beyond = (y.abs() > 3.0).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(beyond, 0.0026998, 5 * std::sqrt(0.0027) / root_n);
  // Neighbours (the two halves of one Box-Muller pair, and of different ones) are uncorrelated.
  const double neighbours = (y.narrow(0, 0, n - 1) * y.narrow(0, 1, n - 1)).mean().item<double>();
  EXPECT_NEAR(neighbours, 0.0, 5 / root_n);
}

TEST(Random, Refuses) {
  Tensor strided = at::empty({4, 6}).t(), integers = at::empty({4}, at::kLong);
  EXPECT_THROW(fill_normal(strided, 1, "w", 1.0), Error);
  EXPECT_THROW(fill_normal(integers, 1, "w", 1.0), Error);
}

} // namespace
} // namespace pith
