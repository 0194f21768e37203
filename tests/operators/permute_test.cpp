#include "operators/permute.h"
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include "tests/operators/error_text.h"
#include "tests/operators/gradient_check.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
struct Case {
  std::vector<int64_t> topk_idx; // (rows, k)
  int64_t rows, k, num_experts;
};

const Case kCases[] = {
  {{0, 1, 2, 0, 1, 2}, 3, 2, 4}, // expert 3 without rows
  {{3, 3, 3, 3, 3}, 5, 1, 4}, // one expert with all rows
  {{-1, 2, 0, -1, -1, -1, 1, 0, 2, 1, 0, -1}, 4, 3, 3}, // entries of other ranks, a row without any
  {{-1, -1}, 1, 2, 5}, // no slots at all
  {{}, 0, 2, 3}, // no rows at all
  {{1}, 1, 1, 2}, // a single token
  {{1, 1, 0, 0}, 2, 2, 2}, // an expert twice in a row
};

TEST(ExpertPlan, IsAStableSortByExpert) {
  for (const Case& c: kCases) {
    const ExpertPlan plan = make_expert_plan(ids(c.topk_idx, {c.rows, c.k}), c.num_experts);
    std::vector<int32_t> row_of_slot, offsets, slot_of(c.topk_idx.size(), -1);
    for (int64_t e = 0; e < c.num_experts; ++e) {
      for (size_t i = 0; i < c.topk_idx.size(); ++i) {
        if (c.topk_idx[i] != e) continue;
        slot_of[i] = static_cast<int32_t>(row_of_slot.size());
        row_of_slot.push_back(static_cast<int32_t>(i) / static_cast<int32_t>(c.k));
      }
      offsets.push_back(static_cast<int32_t>(row_of_slot.size()));
    }
    EXPECT_EQ(list<int32_t>(plan.row_of_slot), row_of_slot);
    EXPECT_EQ(list<int32_t>(plan.slot_of), slot_of);
    EXPECT_EQ(list<int32_t>(plan.offsets), offsets);
    EXPECT_EQ(plan.num_slots(), static_cast<int64_t>(row_of_slot.size()));
  }
}

TEST(Permute, GradientsMatchFiniteDifferences) {
  const OneThread scope;
  for (const Case& c: kCases) {
    const ExpertPlan plan = make_expert_plan(ids(c.topk_idx, {c.rows, c.k}), c.num_experts);
    const Tensor rows = random_tensor("rows", {c.rows, 3});
    check_gradients([&] { return permute(rows, plan); }, {rows}, {});
    const Tensor expert_rows = random_tensor("expert_rows", {plan.num_slots(), 11});
    const Tensor weight = random_tensor("weight", {c.rows, c.k});
    check_gradients(
      [&] { return unpermute(expert_rows, weight, plan); }, {expert_rows, weight}, {});
  }
}

TEST(Permute, MovesRowsAndSumsThemBack) {
  const ExpertPlan plan = make_expert_plan(ids({2, 0, -1, 2, -1, -1}, {3, 2}), 3);
  const Tensor rows = values({1, 2, 3, 4, 5, 6}, {3, 2});
  EXPECT_EQ(
    list<float>(permute(rows, plan)), (std::vector<float>{1, 2, 1, 2, 3, 4})); // rows 0, 0, 1
  const Tensor expert_rows = values({10, 20, 30, 40, 50, 60}, {3, 2});
  const Tensor weight = values({0.5, 2, 9, 0.25, 9, 9}, {3, 2}); // the 9s belong to entries of -1
  EXPECT_EQ(list<float>(unpermute(expert_rows, weight, plan)),
    (std::vector<float>{35, 60, 12.5, 15, 0, 0}));
}

// Sums are in FP32 and rounded once: BF16 partial sums would lose the small terms.
TEST(Permute, Bfloat16IsRoundedOnce) {
  const ExpertPlan plan = make_expert_plan(ids({0, 1, 2, 3, 4, 5, 6, 7}, {1, 8}), 8);
  Tensor expert_rows = at::full({8, 1}, 0.00390625, at::TensorOptions(at::kBFloat16)); // 2^-8
  expert_rows.select(0, 0).fill_(1.0);
  const Tensor weight = at::full({1, 8}, 1.0f);
  EXPECT_EQ(unpermute(expert_rows, weight, plan).item<float>(),
    1.0f + 4.0f / 128); // 1 + 7/256, to even
  EXPECT_EQ(unpermute(expert_rows.to(at::kFloat), weight, plan).item<float>(), 1.0f + 7.0f / 256);

  const Tensor rows = random_tensor("rows", {40, 24}, at::kBFloat16);
  const ExpertPlan many = make_expert_plan(ids(std::vector<int64_t>(80, 3), {40, 2}), 4);
  EXPECT_TRUE(at::equal(permute(rows, many).to(at::kFloat), permute(rows.to(at::kFloat), many)));
}

TEST(Permute, NamesWhatDoesNotFit) {
  const Tensor idx = ids({0, 1, 2, 7}, {2, 2});
  EXPECT_TRUE(contains(error_text([&] { make_expert_plan(idx, 4); }), "topk_idx(1, 1) = 7"));
  EXPECT_TRUE(contains(error_text([&] { make_expert_plan(idx.to(at::kInt), 8); }), "topk_idx"));
  const ExpertPlan plan = make_expert_plan(idx, 8);
  EXPECT_TRUE(contains(error_text([&] { permute(at::zeros({3, 4}), plan); }), "permute: rows"));
  const Tensor rows = at::zeros({4, 4}), weight = at::zeros({2, 2});
  EXPECT_TRUE(contains(
    error_text([&] { unpermute(rows, weight.to(at::kDouble), plan); }), "unpermute: weight"));
  EXPECT_TRUE(contains(
    error_text([&] { unpermute(rows.narrow(0, 0, 3), weight, plan); }), "unpermute: expert_rows"));
}

} // namespace
} // namespace pith::test
