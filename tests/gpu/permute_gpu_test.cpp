#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/randint.h>
#include "operators/matmul.h"
#include "operators/permute.h"
#include "tests/gpu/gpu_check.h"
#include "tests/operators/error_text.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
// Routes for tests, made from normal numbers: expert floor(|x|) of E, or -1 for every fifth entry.
Tensor some_routes(int64_t rows, int64_t k, int64_t num_experts) {
  const Tensor x = random_tensor("routes", {rows, k}, at::kFloat, 3.0).abs();
  Tensor idx = x.floor().to(at::kLong).remainder(num_experts);
  return idx.masked_fill_((x * 1000).to(at::kLong).remainder(5).eq(0), -1);
}

struct Case {
  int64_t rows, k, num_experts, hidden;
};
const Case kCases[] = {{1, 1, 1, 8}, {3, 2, 5, 7}, {64, 8, 128, 264}, {1000, 6, 64, 33},
  {777, 3, 9, 129}, {70000, 2, 4, 8}, {300, 5, 1024, 16}, {0, 2, 3, 8}};

void expect_equal_plans(const ExpertPlan& got, const ExpertPlan& wanted) {
  EXPECT_EQ(got.num_slots(), wanted.num_slots());
  EXPECT_TRUE(at::equal(got.offsets.cpu(), wanted.offsets));
  EXPECT_TRUE(at::equal(got.row_of_slot.cpu(), wanted.row_of_slot));
  EXPECT_TRUE(at::equal(got.slot_of.cpu(), wanted.slot_of));
}

TEST(PermuteGpu, PlanEqualsTheReference) {
  for (const Case& c: kCases) {
    const Tensor idx = some_routes(c.rows, c.k, c.num_experts);
    for (int repeat = 0; repeat < 2; ++repeat) {
      poison();
      expect_equal_plans(
        make_expert_plan(idx.to(kGpu), c.num_experts), make_expert_plan(idx, c.num_experts));
      const ExpertPlan known =
        make_expert_plan(idx, c.num_experts, idx.ge(0).sum().item<int64_t>());
      expect_equal_plans(make_expert_plan(idx.to(kGpu), c.num_experts, known.num_slots()), known);
    }
  }
  const Tensor one = at::full({513, 4}, 2, at::kLong); // one expert has everything
  expect_equal_plans(make_expert_plan(one.to(kGpu), 5), make_expert_plan(one, 5));
  const Tensor none = at::full({40, 2}, -1, at::kLong);
  expect_equal_plans(make_expert_plan(none.to(kGpu), 5), make_expert_plan(none, 5));
}

TEST(PermuteGpu, MatchesTheReference) {
  for (const Case& c: kCases) {
    if (c.rows > 10000) continue;
    SCOPED_TRACE(
      fmt::format("{} rows, k {}, {} experts, hidden {}", c.rows, c.k, c.num_experts, c.hidden));
    const Tensor idx = some_routes(c.rows, c.k, c.num_experts);
    const int64_t slots = make_expert_plan(idx, c.num_experts).num_slots();
    auto plan = [&](
                  const Tensor& x) { return make_expert_plan(idx.to(x.device()), c.num_experts); };
    check_on_gpu([&](const std::vector<Tensor>& x, std::vector<Parameter>&) {
      return permute(x[0], plan(x[0]));
    }, {random_tensor("rows", {c.rows, c.hidden})}, {});
    check_on_gpu(
      [&](const std::vector<Tensor>& x, std::vector<Parameter>&) {
      return unpermute(x[0], x[1].to(wide_dtype(x[1].scalar_type())), plan(x[0]));
    }, {random_tensor("expert_rows", {slots, c.hidden}), random_tensor("weight", {c.rows, c.k})},
      {});
  }
}

// Known fault 33: 38000 x 8 x 7168 elements are more than 2^31.
TEST(PermuteGpu, IndexesBeyond31Bits) {
  const int64_t rows = 38000, k = 8, hidden = 7168;
  const auto bf16 = at::TensorOptions(at::kBFloat16).device(kGpu);
  Tensor x = at::empty({rows, hidden}, bf16);
  fill_normal(x, 1, "large", 1.0);
  const Tensor idx = some_routes(rows, k, 16).clamp_min(0);
  const ExpertPlan plan = make_expert_plan(idx.to(kGpu), 16), host = make_expert_plan(idx, 16);
  const Tensor permuted = permute(x, plan);
  ASSERT_GT(permuted.numel(), int64_t{1} << 31);
  const Tensor sample =
    at::cat({at::arange(5), at::arange(plan.num_slots() - 5, plan.num_slots())}).to(at::kLong);
  const Tensor wanted =
    x.index_select(0, host.row_of_slot.index_select(0, sample).to(at::kLong).to(kGpu));
  EXPECT_TRUE(at::equal(permuted.index_select(0, sample.to(kGpu)), wanted));
  // Every slot holds its row, so weights of 1/8 sum up to the row again, exactly.
  EXPECT_TRUE(at::equal(unpermute(permuted, at::full({rows, k}, 0.125f, kGpu), plan), x));
}

} // namespace
} // namespace pith::test
