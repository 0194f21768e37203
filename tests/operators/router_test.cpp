#include "operators/router.h"
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>
#include "tests/operators/error_text.h"
#include "tests/operators/gradient_check.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
TEST(TopK, SortsAndGivesTiesToTheLowerId) {
  const Tensor scores = values({1, 3, 3, 2, 3, 0, 5, 5, 5, 5, 5, 5}, {2, 6});
  EXPECT_EQ(
    list<int64_t>(topk_lowest_id(scores, 4)), (std::vector<int64_t>{1, 2, 4, 3, 0, 1, 2, 3}));
  EXPECT_EQ(list<int64_t>(topk_lowest_id(scores, 1)), (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(list<int64_t>(topk_lowest_id(scores.slice(0, 0, 1), 6)),
    (std::vector<int64_t>{1, 2, 4, 3, 0, 5}));
  EXPECT_EQ(topk_lowest_id(at::zeros({0, 6}), 2).size(0), 0);
}

// Known fault 26: a router that is all zero takes experts 0 .. k-1, every time; -inf gives distinct
// ids.
TEST(TopK, DegenerateRowsKeepDistinctIds) {
  const Tensor zero = at::zeros({37, 16});
  for (int run = 0; run < 20; ++run) {
    const Tensor idx = topk_lowest_id(zero, 4);
    for (int64_t t = 0; t < 37; ++t) {
      EXPECT_EQ(list<int64_t>(idx.select(0, t)), (std::vector<int64_t>{0, 1, 2, 3}));
    }
  }
  const Tensor masked = at::full({1, 5}, -INFINITY);
  EXPECT_EQ(list<int64_t>(topk_lowest_id(masked, 3)), (std::vector<int64_t>{0, 1, 2}));
  Tensor broken = at::zeros({3, 5});
  broken.select(0, 2).select(0, 4).fill_(NAN);
  broken.select(0, 1).fill_(NAN);
  EXPECT_EQ(list<int64_t>(topk_lowest_id(broken, 5)[2]), (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(list<int64_t>(topk_lowest_id(broken, 2)[1]), (std::vector<int64_t>{0, 1}));
}

// Six experts in three groups: the two groups with the highest single logits, then the best of
// their four experts, wherever the others are.
TEST(TopK, LimitedToGroups) {
  const Tensor scores =
    values({9, 0, 7, 6, 8, 8, 1, 1, 1, 1, 1, 1, -5, -1, -2, -6, -3, -4}, {3, 6});
  EXPECT_EQ(list<int64_t>(group_limited_topk(scores, 3, 3, 2)),
    (std::vector<int64_t>{0, 4, 5, 0, 1, 2, 1, 2, 0}));
  EXPECT_TRUE(at::equal(group_limited_topk(scores, 3, 3, 3), topk_lowest_id(scores, 3)));
  EXPECT_EQ(
    list<int64_t>(group_limited_topk(scores, 2, 3, 1)), (std::vector<int64_t>{0, 1, 0, 1, 1, 0}));
  EXPECT_EQ(group_limited_topk(at::zeros({0, 6}), 2, 3, 2).size(0), 0);
  EXPECT_THROW(group_limited_topk(scores, 3, 3, 1), Error);
  EXPECT_THROW(group_limited_topk(scores, 1, 4, 2), Error);
}

// Known fault 23: the meaning of the weights.
TEST(Route, WeightsOfTheTwoConventions) {
  const Tensor logits = values({2, 1, 0, -1}, {1, 4});
  const Routing normalized = route(logits, 2, true), plain = route(logits, 2, false);
  EXPECT_NEAR(list<float>(normalized.topk_weight)[0], 0.731059, 1e-6);
  EXPECT_NEAR(list<float>(normalized.topk_weight)[1], 0.268941, 1e-6);
  EXPECT_NEAR(list<float>(plain.topk_weight)[0], 0.643914, 1e-6);
  EXPECT_NEAR(list<float>(plain.topk_weight)[1], 0.236883, 1e-6);
  EXPECT_EQ(list<int64_t>(plain.topk_idx), (std::vector<int64_t>{0, 1}));
  EXPECT_NEAR(plain.probabilities.sum().item<float>(), 1.0, 1e-6);
}

TEST(Route, GradientsMatchFiniteDifferences) {
  const OneThread scope;
  const Tensor forced = ids({0, 4, 4, 2, 2, 2, 1, 3, 0}, {3, 3}); // with repeated experts
  for (bool normalize: {false, true}) {
    for (const Tensor& replay: {Tensor(), forced}) {
      const Tensor logits = random_tensor("logits", {3, 5});
      check_gradients(
        [&] { return route(logits, 3, normalize, replay).topk_weight; }, {logits}, {});
      check_gradients(
        [&] { return route(logits, 3, normalize, replay).probabilities; }, {logits}, {});
      check_gradients([&] {
        const Routing r = route(logits, 3, normalize, replay);
        return at::cat({r.probabilities, r.topk_weight}, 1);
      }, {logits}, {});
    }
  }
  const Tensor one = random_tensor("logits", {4, 1});
  check_gradients([&] { return route(one, 1, true).topk_weight; }, {one}, {});
}

TEST(Route, ForcedRoutesReplaceTheSelection) {
  const Tensor logits = random_tensor("logits", {6, 8}, at::kFloat);
  const Routing free = route(logits, 2, true);
  const Routing replay = route(logits, 2, true, free.topk_idx);
  EXPECT_TRUE(at::equal(free.topk_weight, replay.topk_weight));
  const Routing balanced = route(logits, 2, false, balanced_routes(6, 2, 8, at::kCPU));
  EXPECT_TRUE(at::equal(balanced.topk_weight, balanced.probabilities.gather(1, balanced.topk_idx)));
}

TEST(Route, BalancedRoutesLoadAllExpertsEqually) {
  const Tensor idx = balanced_routes(30, 4, 8, at::kCPU);
  EXPECT_EQ(list<int64_t>(at::bincount(idx.flatten(), {}, 8)), std::vector<int64_t>(8, 15));
  EXPECT_EQ(list<int64_t>(idx.select(0, 3)), (std::vector<int64_t>{4, 5, 6, 7}));
}

TEST(Route, NamesWhatDoesNotFit) {
  const Tensor logits = at::zeros({3, 4});
  EXPECT_TRUE(
    contains(error_text([&] { route(logits.to(at::kBFloat16), 2, true); }), "route: logits"));
  EXPECT_TRUE(contains(error_text([&] { route(logits, 5, true); }), "k = 5 of 4"));
  EXPECT_TRUE(
    contains(error_text([&] { route(logits, 2, true, ids({0, 1}, {1, 2})); }), "route: forced"));
  EXPECT_TRUE(contains(
    error_text([&] { route(logits, 1, true, ids({0, 4, 1}, {3, 1})); }), "forced(1, 0) = 4"));
}

Tensor sequence_balance_loss(
  const Tensor& probabilities, const Tensor& topk_idx, const Tensor& row_id, int64_t num_rows) {
  return start_balance_loss(probabilities, topk_idx, row_id, num_rows)().loss;
}

// Known fault 27: uniform routing gives 1 (not top_k), collapse on one of two experts gives 2.
TEST(BalanceLoss, ValuesByDefinition) {
  const Tensor row = at::zeros({64}, at::TensorOptions(at::kInt));
  const Tensor uniform = at::full({64, 128}, 1.0f / 128);
  const Tensor routes = balanced_routes(64, 8, 128, at::kCPU);
  EXPECT_NEAR(sequence_balance_loss(uniform, routes, row, 1).item<float>(), 1.0, 1e-6);
  Tensor collapsed = at::zeros({64, 2});
  collapsed.select(1, 1).fill_(1.0);
  const Tensor all_one = at::full({64, 1}, 1, at::TensorOptions(at::kLong));
  EXPECT_NEAR(sequence_balance_loss(collapsed, all_one, row, 1).item<float>(), 2.0, 1e-6);
}

// The charge of an expert by hand: two rows of 3 and 1 tokens, the last one padding, top-1 of 2.
TEST(BalanceLoss, KindsByDefinition) {
  const Tensor row = ids({0, 0, 0, 1, ~1}, {5}).to(at::kInt), idx = ids({0, 0, 1, 1, 0}, {5, 1});
  Tensor p = at::tensor({.9f, .1f, .8f, .2f, .3f, .7f, .4f, .6f, .5f, .5f}).view({5, 2});
  const auto run = [&](BalanceKind kind, const Tensor& shares) {
    Tensor leaf = p.clone().set_requires_grad(true);
    const RouterBalance out = start_balance_loss(leaf, idx, row, 2, {}, kind, shares)();
    EXPECT_TRUE(at::equal(out.counts, ids({2, 2}, {2})));
    out.loss.backward();
    EXPECT_NEAR((leaf.grad() * p).sum().item<double>(), out.loss.item<double>(), 1e-6);
    EXPECT_EQ(leaf.grad()[4].abs().sum().item<double>(), 0);
    return out.loss.item<double>();
  };
  EXPECT_NEAR(run(BalanceKind::sequence, {}), 2 * (2. / 3 * 2 / 3 + 1. / 3 / 3) + 2 * .6, 1e-6);
  EXPECT_NEAR(run(BalanceKind::micro_batch, {}), 1 + 1, 1e-6);
  const Tensor shares = at::tensor({.75, .25}, at::kDouble);
  EXPECT_NEAR(run(BalanceKind::global_batch, shares),
    2 * (.75 * 2 / 3 + .25 / 3) + 2 * (.75 * .4 + .25 * .6), 1e-6);
}

TEST(BalanceLoss, GradientsMatchFiniteDifferences) {
  const OneThread scope;
  const Tensor row = ids({0, 0, 0, 2, 2, 3, 3, 3, 3}, {9}).to(at::kInt); // row 1 has no tokens
  const Tensor routes = ids({0, 1, 2, 0, 1, 3, 3, 0, 1, 2, 4, 0, 2, 1, 3, 4, 0, 4}, {9, 2});
  const Tensor p = random_tensor("p", {9, 5});
  check_gradients([&] { return sequence_balance_loss(p, routes, row, 4); }, {p}, {});
}

// A row's share does not depend on which rows share its micro-batch.
TEST(BalanceLoss, IsTheSumOverRows) {
  const Tensor logits = random_tensor("logits", {20, 6}, at::kFloat);
  const Routing r = route(logits, 2, true);
  const Tensor row = at::cat({at::zeros({7}), at::full({13}, 1)}).to(at::kInt);
  const auto part = [&](int64_t first, int64_t count) {
    return sequence_balance_loss(r.probabilities.narrow(0, first, count),
      r.topk_idx.narrow(0, first, count), at::zeros({count}, at::TensorOptions(at::kInt)), 1);
  };
  EXPECT_NEAR(sequence_balance_loss(r.probabilities, r.topk_idx, row, 2).item<float>(),
    part(0, 7).item<float>() + part(7, 13).item<float>(), 1e-6);
}

// Known fault 27: rows padded at their end, from 3 to 8 and from 4 to 4 tokens, lose nothing and
// gain nothing, whatever the padding's routes.
TEST(BalanceLoss, PaddingDoesNotCount) {
  const Tensor logits = random_tensor("logits", {12, 6}, at::kFloat);
  const Tensor kept = ids({0, 1, 2, 8, 9, 10, 11}, {7});
  const auto run = [&](const Tensor& x, const Tensor& row, Tensor& gradient) {
    const Tensor leaf = x.clone().set_requires_grad(true);
    const Routing r = route(leaf, 2, true);
    const Tensor loss = sequence_balance_loss(r.probabilities, r.topk_idx, row.to(at::kInt), 3);
    loss.backward();
    gradient = leaf.grad();
    return loss.item<float>();
  };
  Tensor padded, alone;
  EXPECT_EQ(run(logits, ids({0, 0, 0, ~0, ~0, ~0, ~0, ~0, 2, 2, 2, 2}, {12}), padded),
    run(logits.index_select(0, kept), ids({0, 0, 0, 2, 2, 2, 2}, {7}), alone));
  EXPECT_TRUE(at::equal(padded.index_select(0, kept), alone));
  EXPECT_EQ(padded.narrow(0, 3, 5).abs().sum().item<float>(), 0);
}

// Known fault 24: counts are integers; 40840 and 40960 are the same number in BF16.
TEST(BalanceLoss, CountsAreExact) {
  const Tensor routes = at::cat({at::zeros({40960, 1}), at::full({40840, 1}, 1)}).to(at::kLong);
  Tensor p = at::full({81800, 2}, 0.5f).set_requires_grad(true);
  sequence_balance_loss(p, routes, at::zeros({81800}, at::TensorOptions(at::kInt)), 1).backward();
  EXPECT_NEAR(
    p.grad()[0][0].item<double>() / p.grad()[0][1].item<double>(), 40960.0 / 40840.0, 1e-6);
}

TEST(BalanceLoss, NamesWhatDoesNotFit) {
  const Tensor p = at::zeros({2, 4});
  auto error = [&](const Tensor& idx, const Tensor& row) {
    return error_text([&] { sequence_balance_loss(p, idx, row, 2); });
  };
  const Tensor idx = ids({0, 3}, {2, 1}), row = ids({0, 1}, {2}).to(at::kInt);
  EXPECT_TRUE(contains(error(ids({0, 4}, {2, 1}), row), "topk_idx(1, 0) = 4"));
  EXPECT_TRUE(contains(error(idx, ids({0, 3}, {2}).to(at::kInt)), "row_id[1] = 3"));
  EXPECT_TRUE(contains(error(idx, ids({0, 1}, {2})), "row_id"));
}

} // namespace
} // namespace pith::test
