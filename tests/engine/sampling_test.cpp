#include "engine/sampling.h"
#include <gtest/gtest.h>
#include <cmath>
#include <limits>
#include <map>
#include <vector>
#include "core/error.h"

namespace pith {
namespace {
constexpr float kInf = std::numeric_limits<float>::infinity();

// How often each id was drawn.
std::map<int64_t, int> counts(
  const std::vector<float>& logits, const SamplingOptions& options, int draws) {
  std::map<int64_t, int> result;
  for (int i = 0; i < draws; ++i) ++result[sample(logits, options, static_cast<uint64_t>(i))];
  return result;
}

// The draws follow `expected` (0 = never drawn): chi-square below its 99.9 % point for up to 9
// degrees of freedom, with a fixed seed.
void expect_distribution(
  const std::vector<float>& logits, const SamplingOptions& options, std::vector<double> expected) {
  constexpr int kDraws = 10000;
  double total = 0, chi_square = 0;
  for (const double p: expected) total += p;
  auto drawn = counts(logits, options, kDraws);
  for (size_t i = 0; i < expected.size(); ++i) {
    const double wanted = kDraws * expected[i] / total, got = drawn[static_cast<int64_t>(i)];
    if (wanted == 0) {
      EXPECT_EQ(got, 0) << "id " << i;
    } else {
      chi_square += (got - wanted) * (got - wanted) / wanted;
    }
  }
  EXPECT_LT(chi_square, 27.9);
}

std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p: probabilities) logits.push_back(static_cast<float>(std::log(p) + 3));
  return logits;
}

TEST(Sampling, FollowsTheSoftmax) {
  const std::vector<double> p = {0.05, 0.4, 0.15, 0.1, 0.3};
  expect_distribution(logits_of(p), {.seed = 1}, p);
  std::vector<double> squared, root;
  for (const double x: p) squared.push_back(x * x), root.push_back(std::sqrt(x));
  expect_distribution(logits_of(p), {.temperature = 0.5, .seed = 2}, squared);
  expect_distribution(logits_of(p), {.temperature = 2, .seed = 3}, root);
}

TEST(Sampling, FiltersKeepWhatTheyShould) {
  const std::vector<double> p = {0.05, 0.4, 0.15, 0.1, 0.3};
  const auto logits = logits_of(p);
  expect_distribution(logits, {.top_k = 2, .seed = 1}, {0, 0.4, 0, 0, 0.3});
  expect_distribution(logits, {.top_k = 99, .seed = 1}, p);
  expect_distribution(logits, {.top_p = 0.6, .seed = 1}, {0, 0.4, 0, 0, 0.3});
  expect_distribution(logits, {.top_p = 0.71, .seed = 1}, {0, 0.4, 0.15, 0, 0.3});
  expect_distribution(logits, {.min_p = 0.3, .seed = 1}, {0, 0.4, 0.15, 0, 0.3});
  // In order: top_k leaves 0.4 and 0.3, of which the first alone is 0.571 of what is left.
  expect_distribution(logits, {.top_p = 0.56, .top_k = 2, .seed = 1}, {0, 1, 0, 0, 0});
  // Temperature comes first: of p^2, normalised, 0.55 0.31 0.077 ..., two reach 0.8.
  expect_distribution(logits, {.temperature = 0.5, .top_p = 0.8, .seed = 1}, {0, 0.16, 0, 0, 0.09});
}

TEST(Sampling, GreedyAndItsEquals) {
  const std::vector<float> logits = {1, 5, -kInf, 5, 4};
  const SamplingOptions greedy{.temperature = 0};
  EXPECT_EQ(sample(logits, greedy, 0), 1); // the lower id of equal logits
  for (uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(sample(logits, {.top_k = 1, .seed = i}, i), 1);
    EXPECT_EQ(sample(logits, {.top_p = 1e-9, .seed = i}, i), 1);
    EXPECT_EQ(sample(logits, {.top_p = 0, .seed = i}, i), 1);
    EXPECT_EQ(sample(logits, {.temperature = 1e-30, .top_k = 1, .seed = i}, i), 1);
    const int64_t either = sample(logits, {.min_p = 1, .seed = i}, i);
    EXPECT_TRUE(either == 1 || either == 3);
  }
  EXPECT_EQ(sample(std::vector<float>{-3}, {}, 7), 0);
}

TEST(Sampling, EqualLogitsRankByTheLowerId) {
  const std::vector<float> logits(100, 2.5f);
  for (const auto& [id, count]: counts(logits, {.top_k = 3, .seed = 5}, 500)) EXPECT_LT(id, 3);
  for (const auto& [id, count]: counts(logits, {.top_p = 0.0299, .seed = 5}, 500)) EXPECT_LT(id, 3);
  expect_distribution(std::vector<float>(10, 0.f), {.seed = 4}, std::vector<double>(10, 1));
}

TEST(Sampling, MaskedTokensAreNeverDrawn) {
  expect_distribution({-kInf, 0, -kInf, 0, -kInf}, {.seed = 1}, {0, 1, 0, 1, 0});
  expect_distribution({-kInf, 0, -kInf, 0, -kInf}, {.top_k = 4, .seed = 1}, {0, 1, 0, 1, 0});
  expect_distribution({-kInf, 0, -1e30f, 0, -kInf}, {.top_p = 0.9999, .seed = 1}, {0, 1, 0, 1, 0});
}

TEST(Sampling, IsAFunctionOfSeedAndDraw) {
  std::vector<float> logits(1000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(std::sin(double(i)));
  const SamplingOptions options{.top_p = 0.9, .seed = 11};
  int same_draw = 0, same_seed = 0;
  for (uint64_t i = 0; i < 200; ++i) {
    const int64_t id = sample(logits, options, i);
    EXPECT_EQ(id, sample(logits, options, i));
    same_draw += id == sample(logits, options, i + 1);
    same_seed += id == sample(logits, {.top_p = 0.9, .seed = 12}, i);
  }
  EXPECT_LT(same_draw, 10);
  EXPECT_LT(same_seed, 10);
}

// The partial sort of top_p grows in blocks: more than one block is right too.
TEST(Sampling, WideNucleus) {
  std::vector<float> logits(2000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i) * 1e-4f;
  int64_t smallest = 2000;
  for (const auto& [id, count]: counts(logits, {.top_p = 0.5, .seed = 1}, 1000)) {
    smallest = std::min(smallest, id);
  }
  EXPECT_GE(smallest, 1049); // ids above 1049 hold half of the mass: sum of exp(i / 10^4)
  EXPECT_LE(smallest, 1070);
}

TEST(Sampling, RefusesWhatCannotBeDrawnFrom) {
  const std::vector<float> good = {1, 2};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& bad:
    std::vector<std::vector<float>>{{nan, 1}, {1, nan}, {1, kInf}, {-kInf, -kInf}}) {
    EXPECT_THROW(sample(bad, {}, 0), Error);
    EXPECT_THROW(sample(bad, {.temperature = 0}, 0), Error);
  }
  const double not_a_number = std::nan("");
  for (const SamplingOptions& bad: {SamplingOptions{.temperature = -1},
         SamplingOptions{.temperature = not_a_number}, SamplingOptions{.temperature = double{kInf}},
         SamplingOptions{.top_p = 1.1}, SamplingOptions{.top_p = not_a_number},
         SamplingOptions{.min_p = -0.1}, SamplingOptions{.top_k = -1}}) {
    EXPECT_THROW(sample(good, bad, 0), Error);
  }
}

} // namespace
} // namespace pith
