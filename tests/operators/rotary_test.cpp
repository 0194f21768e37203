#include "operators/rotary.h"
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fstream>
#include <nlohmann/json.hpp>
#include "tests/operators/gradient_check.h"

namespace pith::test {
namespace {
Tensor places(std::vector<int32_t> values) { return at::tensor(values, at::kInt); }

nlohmann::json golden() {
  std::ifstream file(std::string(PITH_SOURCE_DIR) + "/tests/golden/rope.json");
  return nlohmann::json::parse(file);
}

TEST(Rotary, GradientsMatchFiniteDifferences) {
  struct Turn {
    std::vector<int32_t> positions;
    int64_t heads, dim;
  };
  const Turn cases[] = {{{0}, 1, 2}, {{5}, 1, 4}, {{3, 0, 9}, 3, 6}, {{1, 2}, 5, 10}, {{}, 2, 4}};
  for (const Turn& c: cases) {
    SCOPED_TRACE(fmt::format("{} tokens {} {}", c.positions.size(), c.heads, c.dim));
    const RotaryTable table = make_rotary_table(10, c.dim, 10000.0, at::kCPU);
    Tensor x = random_tensor("x", {static_cast<int64_t>(c.positions.size()), c.heads, c.dim});
    check_gradients([&] { return rotary(x, places(c.positions), table); }, {x}, {});
  }
}

// Pairs are (i, i + D/2), the layout of Hugging Face's Qwen3 and GPT-OSS. For unit vectors the
// result can be written down; the neighbours' layout (2i, 2i + 1) fails this.
TEST(Rotary, HalfSplitLayout) {
  const RotaryTable table = make_rotary_table(8, 8, 10000.0, at::kCPU);
  for (int64_t i = 0; i < 4; ++i) {
    Tensor x = at::zeros({1, 1, 8}, at::kDouble);
    x[0][0][i] = 1.0;
    const Tensor y = rotary(x, places({7}), table);
    const double angle = 7 * std::pow(10000.0, -static_cast<double>(i) / 4);
    EXPECT_NEAR(y[0][0][i].item<double>(), std::cos(angle), 1e-7);
    EXPECT_NEAR(y[0][0][i + 4].item<double>(), std::sin(angle), 1e-7);
    EXPECT_NEAR(
      y.abs().sum().item<double>(), std::abs(std::cos(angle)) + std::abs(std::sin(angle)), 1e-6);
  }
}

// Pairs (2i, 2i + 1), as DeepSeek has them, after elements that are not turned; q and k as
// transformers' DeepSeek-V2 turns them.
TEST(Rotary, NeighboursBehindPlainElements) {
  const auto turn = [](const Tensor& x, std::vector<int32_t> positions, int64_t first) {
    const RotaryTable table = make_rotary_table(8, x.size(2) - first, 10000.0, at::kCPU);
    return rotary(x, places(std::move(positions)), table, RotaryPairs::neighbours, first);
  };
  const nlohmann::json expected = golden()["pair_layout"];
  ASSERT_EQ(expected["theta"], 10000.0);
  for (const char* name: {"q", "k"}) {
    const std::vector<double> x = expected[name], y = expected["interleaved"][name];
    const Tensor got = turn(
      at::tensor(x, at::kDouble).view({1, 1, 8}), {expected[std::string(name) + "_position"]}, 0);
    EXPECT_LE(max_difference(got, at::tensor(y, at::kDouble).view({1, 1, 8})), 1e-6);
  }
  Tensor x = random_tensor("x", {3, 2, 11});
  const Tensor y = turn(x, {0, 7, 3}, 5);
  EXPECT_TRUE(at::equal(y.narrow(2, 0, 5), x.narrow(2, 0, 5)));
  EXPECT_TRUE(at::equal(y.narrow(2, 5, 6), turn(x.narrow(2, 5, 6), {0, 7, 3}, 0)));
  check_gradients([&] { return turn(x, {0, 7, 3}, 5); }, {x}, {});
  check_gradients([&] { return turn(x.narrow(2, 1, 4), {1, 0, 6}, 2); }, {x}, {});
}

// Part of a head (Qwen3.5): the first elements are turned, those behind them copied.
TEST(Rotary, PartOfAHead) {
  const RotaryTable table = make_rotary_table(8, 4, 10000.0, at::kCPU);
  Tensor x = random_tensor("x", {3, 2, 9});
  const Tensor y = rotary(x, places({0, 7, 3}), table);
  EXPECT_TRUE(at::equal(y.narrow(2, 4, 5), x.narrow(2, 4, 5)));
  EXPECT_TRUE(at::equal(y.narrow(2, 0, 4), rotary(x.narrow(2, 0, 4), places({0, 7, 3}), table)));
  check_gradients([&] { return rotary(x, places({0, 7, 3}), table); }, {x}, {});
}

// Known fault 19: DeepSeek-V2-Lite's numbers.
TEST(Rotary, YarnOfDeepseek) {
  const double mscale = yarn_mscale(40, 0.707);
  EXPECT_NEAR(mscale, 1.2608038, 1e-7);
  EXPECT_EQ(yarn_mscale(1, 0.707), 1);
  const Yarn yarn{.factor = 40, .original_positions = 4096};
  const RotaryTable plain = make_rotary_table(2, 64, 10000.0, at::kCPU);
  const RotaryTable got = make_rotary_table(2, 64, 10000.0, at::kCPU, yarn);
  const Tensor angle = got.sin[1].to(at::kDouble).asin(),
               before = plain.sin[1].to(at::kDouble).asin();
  EXPECT_LE(max_difference(angle.narrow(0, 0, 11), before.narrow(0, 0, 11)), 1e-7); // kept
  EXPECT_LE(max_difference(angle.narrow(0, 23, 9) * 40, before.narrow(0, 23, 9)), 1e-6);
  EXPECT_NEAR(angle[16].item<double>(), 0.0055, 1e-7);
  EXPECT_GT((before[11] / angle[11]).item<double>(), 1.01);
  EXPECT_LT((before[22] / angle[22]).item<double>(), 39);
  const RotaryTable louder =
    make_rotary_table(2, 64, 10000.0, at::kCPU, {.factor = 40, .magnitude = 1.5});
  EXPECT_LE(max_difference(louder.cos, got.cos * 1.5), 1e-6);
  // gpt-oss does not round the borders (8.09 and 17.4 of 32).
  const Yarn exact{.factor = 32, .original_positions = 4096, .truncate = false};
  const RotaryTable oss = make_rotary_table(2, 64, 150000.0, at::kCPU, exact);
  const double share = (9 - 8.0928) / (17.3980 - 8.0928), frequency = std::pow(150000.0, -9.0 / 32);
  EXPECT_NEAR(oss.sin[1][9].item<double>(), std::sin(frequency * (1 - share + share / 32)), 1e-5);
}

// What the rotation is for: products of queries and keys depend on the distance alone.
TEST(Rotary, ProductsDependOnDistance) {
  const RotaryTable table = make_rotary_table(5000, 16, 1e6, at::kCPU);
  const Tensor q = random_tensor("q", {1, 1, 16}), k = random_tensor("k", {1, 1, 16});
  const auto product = [&](int32_t at_q, int32_t at_k) {
    return (rotary(q, places({at_q}), table) * rotary(k, places({at_k}), table))
      .sum()
      .item<double>();
  };
  EXPECT_NEAR(product(7, 3), product(4, 0), 1e-5);
  EXPECT_NEAR(product(7, 3), product(4900, 4896), 1e-5);
  EXPECT_GT(std::abs(product(7, 3) - product(3, 7)), 1e-3);
}

// Positions that BF16 cannot tell apart (256, 257) and long ones, against FP64.
TEST(Rotary, TableHasFp32Precision) {
  const nlohmann::json tables = golden()["tables"];
  ASSERT_EQ(tables.size(), 2u);
  for (const nlohmann::json& table: tables) {
    const int64_t dim = table["head_dim"];
    const RotaryTable got = make_rotary_table(131072, dim, table["theta"], at::kCPU);
    EXPECT_EQ(got.cos.scalar_type(), at::kFloat);
    for (size_t p = 0; p < table["positions"].size(); ++p) {
      const int64_t position = table["positions"][p];
      const std::vector<double> cos = table["cos"][p], sin = table["sin"][p];
      EXPECT_LE(max_difference(got.cos[position], at::tensor(cos, at::kDouble)), 1e-7) << position;
      EXPECT_LE(max_difference(got.sin[position], at::tensor(sin, at::kDouble)), 1e-7) << position;
    }
    EXPECT_GT(max_difference(got.cos[256], got.cos[257]), 0.1);
  }
}

// A query and a key as transformers' Qwen3 turns them, and their product.
TEST(Rotary, AgreesWithTransformers) {
  const nlohmann::json expected = golden()["pair_layout"];
  const RotaryTable table = make_rotary_table(8, 8, expected["theta"], at::kCPU);
  std::vector<Tensor> turned;
  for (const char* name: {"q", "k"}) {
    const std::vector<double> x = expected[name], y = expected["half_split"][name];
    const int32_t position = expected[std::string(name) + "_position"];
    turned.push_back(rotary(at::tensor(x, at::kDouble).view({1, 1, 8}), places({position}), table));
    EXPECT_LE(max_difference(turned.back(), at::tensor(y, at::kDouble).view({1, 1, 8})), 1e-6);
  }
  const double product = (turned[0] * turned[1]).sum().item<double>();
  EXPECT_NEAR(product, expected["half_split"]["dot"].get<double>(), 1e-6);
  EXPECT_GT(std::abs(product - expected["interleaved"]["dot"].get<double>()), 0.1);
}

TEST(Rotary, StridedViewsAndBFloat16) {
  const RotaryTable table = make_rotary_table(10, 6, 10000.0, at::kCPU);
  Tensor fused = random_tensor("x", {3, 24});
  const Tensor positions = places({2, 9, 0});
  const auto heads = [](const Tensor& t) { return t.view({3, 4, 6}).narrow(1, 1, 2); };
  check_gradients([&] { return rotary(heads(fused), positions, table); }, {fused}, {});
  const Tensor rounded = fused.detach().to(at::kBFloat16);
  const Tensor got = rotary(heads(rounded), positions, table);
  const Tensor exact = rotary(heads(rounded.to(at::kDouble)), positions, table);
  EXPECT_TRUE(at::equal(got, exact.to(at::kFloat).to(at::kBFloat16)));
}

TEST(Rotary, Refuses) {
  const RotaryTable table = make_rotary_table(4, 6, 10000.0, at::kCPU);
  const Tensor x = random_tensor("x", {2, 1, 6});
  EXPECT_THROW(rotary(x, places({0, 4}), table), Error);
  EXPECT_THROW(rotary(x, places({0, -1}), table), Error);
  EXPECT_THROW(rotary(x, places({0}), table), Error);
  EXPECT_THROW(rotary(x, places({0, 1}).to(at::kLong), table), Error);
  EXPECT_THROW(rotary(random_tensor("x", {2, 1, 4}), places({0, 1}), table), Error);
  EXPECT_THROW(rotary(random_tensor("x", {2, 6, 3}).transpose(1, 2), places({0, 1}), table), Error);
  EXPECT_THROW(make_rotary_table(4, 5, 10000.0, at::kCPU), Error);
}

} // namespace
} // namespace pith::test
