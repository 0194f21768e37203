#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include "operators/matmul.h"
#include "operators/router.h"
#include "tests/gpu/gpu_check.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
struct Case {
  int64_t rows, num_experts, k;
};
const Case kCases[] = {{1, 1, 1}, {3, 5, 2}, {37, 32, 4}, {64, 33, 8}, {129, 60, 6}, {257, 128, 8},
  {5, 1000, 40}, {2, 1024, 1}};

// Scores are FP32 whatever the dtype of the run.
Tensor wide(const Tensor& x) { return x.to(wide_dtype(x.scalar_type())); }

TEST(RouterGpu, TopKEqualsTheReference) {
  for (const Case& c: kCases) {
    // Rounded to quarters: many ties, and both zeros.
    const Tensor scores =
      (random_tensor("scores", {c.rows, c.num_experts}, at::kFloat) * 4).round() / 4;
    poison();
    EXPECT_TRUE(at::equal(topk_lowest_id(scores.to(kGpu), c.k).cpu(), topk_lowest_id(scores, c.k)));
    const Tensor zero = at::zeros_like(scores) * -1; // -0
    EXPECT_TRUE(at::equal(topk_lowest_id(zero.to(kGpu), c.k).cpu(), topk_lowest_id(zero, c.k)));
  }
  EXPECT_EQ(topk_lowest_id(at::zeros({0, 4}).to(kGpu), 2).size(0), 0);
}

TEST(RouterGpu, GroupLimitedTopKEqualsTheReference) {
  for (const Case& c: {Case{129, 160, 6}, Case{37, 12, 3}, Case{1, 8, 4}}) {
    const Tensor scores =
      (random_tensor("scores", {c.rows, c.num_experts}, at::kFloat) * 4).round() / 4;
    EXPECT_TRUE(at::equal(
      group_limited_topk(scores.to(kGpu), c.k, 4, 2).cpu(), group_limited_topk(scores, c.k, 4, 2)));
  }
}

// Known fault 26: -inf and NaN rows give distinct ids; NaN comes after everything else.
TEST(RouterGpu, DegenerateRowsKeepDistinctIds) {
  const Tensor nan = at::full({1, 6}, NAN);
  EXPECT_EQ(list<int64_t>(topk_lowest_id(nan.to(kGpu), 3)), (std::vector<int64_t>{0, 1, 2}));
  const Tensor mixed = values({NAN, -INFINITY, 1, NAN, INFINITY, 1}, {1, 6});
  EXPECT_EQ(
    list<int64_t>(topk_lowest_id(mixed.to(kGpu), 6)), (std::vector<int64_t>{4, 2, 5, 1, 0, 3}));
  EXPECT_EQ(list<int64_t>(route(nan.to(kGpu), 3, true).topk_idx), (std::vector<int64_t>{0, 1, 2}));
}

TEST(RouterGpu, RouteMatchesTheReference) {
  for (const Case& c: kCases) {
    const Tensor logits = random_tensor("logits", {c.rows, c.num_experts});
    const Tensor balanced = balanced_routes(c.rows, c.k, c.num_experts, at::kCPU);
    for (bool normalize: {false, true}) {
      for (bool forced: {false, true}) {
        SCOPED_TRACE(fmt::format(
          "{} rows, top {} of {}, {} {}", c.rows, c.k, c.num_experts, normalize, forced));
        check_on_gpu([&](const std::vector<Tensor>& x, std::vector<Parameter>&) {
          const Routing r =
            route(wide(x[0]), c.k, normalize, forced ? balanced.to(x[0].device()) : Tensor());
          return at::cat({r.probabilities, r.topk_weight}, 1);
        }, {logits}, {});
        check_on_gpu([&](const std::vector<Tensor>& x, std::vector<Parameter>&) {
          return route(wide(x[0]), c.k, normalize).topk_weight;
        }, {logits}, {});
      }
    }
    EXPECT_TRUE(at::equal(balanced_routes(c.rows, c.k, c.num_experts, kGpu).cpu(), balanced));
    const Tensor fp32 = logits.to(at::kFloat);
    EXPECT_TRUE(
      at::equal(route(fp32.to(kGpu), c.k, true).topk_idx.cpu(), route(fp32, c.k, true).topk_idx));
  }
}

TEST(RouterGpu, BalanceLossMatchesTheReference) {
  for (const Case& c: kCases) {
    const Tensor probabilities = random_tensor("p", {c.rows, c.num_experts}).abs();
    const Tensor idx = topk_lowest_id(random_tensor("scores", {c.rows, c.num_experts}), c.k);
    const int64_t first = c.rows / 3; // rows 0 and 2; row 1 is without tokens, so is the last
    const auto int32 = at::TensorOptions(at::kInt);
    const int64_t padding = (c.rows - first) / 3;
    const Tensor row_id = at::cat({at::zeros({first}, int32),
      at::full({c.rows - first - padding}, 2, int32), at::full({padding}, ~2, int32)});
    check_on_gpu([&](const std::vector<Tensor>& x, std::vector<Parameter>&) {
      return start_balance_loss(wide(x[0]), idx.to(x[0].device()), row_id.to(x[0].device()), 4)()
        .loss;
    }, {probabilities}, {});
  }
}

} // namespace
} // namespace pith::test
