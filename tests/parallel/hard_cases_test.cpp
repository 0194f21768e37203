// Cases at the edge, on layouts of this many processes against one process: nothing for a rank to
// do, everything for one rank, the least of everything. The others are in context_test.cpp
// (document borders on and next to a context-parallel border) and layout_test.cpp (odd vocabulary,
// layers that no number of chunks divides).
#include <fmt/ranges.h>
#include <numeric>
#include "tests/parallel/layout.h"

namespace pith::test {
namespace {
Problem problem_of(int64_t rows, int64_t length, std::vector<int64_t> experts = {}) {
  nlohmann::json config = tiny_config();
  config["num_experts"] = 8;
  if (!experts.empty()) config["num_experts_per_tok"] = experts.size();
  return {config, ragged_rows(rows, length, 61), std::move(experts)};
}

// Expert parallelism over as many ranks as there are, with CP and with PP where that goes.
std::vector<Layout> expert_layouts() {
  const int64_t n = world().size();
  std::vector<Layout> list{{.shape = {.ep = n}}, {{.cp = 2, .ep = n}, ShardMode::reshard}};
  if (n > 2) list.push_back({.shape = {.pp = 2, .ep = n / 2}});
  return list;
}

// Known fault 7. Experts 0 and 1 are on the first rank: the others compute no row.
TEST(HardCases, ARankWithoutTokensInItsExperts) {
  const Problem problem = problem_of(2 * world().size(), 16, {0, 1});
  const Outcome expected = run_alone(problem, Rule::sgd, 3);
  for (const Layout& layout: expert_layouts()) expect_same(problem, layout, 3, expected);
  for (const auto& [name, grad]: expected.grads) {
    if (name.find("experts.2.") == std::string::npos) continue;
    EXPECT_EQ(grad.abs().max().item<double>(), 0) << name;
  }
}

TEST(HardCases, AllTokensToOneExpert) {
  const Problem problem = problem_of(2 * world().size(), 16, {7});
  const Outcome expected = run_alone(problem, Rule::sgd, 3);
  for (const Layout& layout: expert_layouts()) expect_same(problem, layout, 3, expected);
}

// All ranks but one have a loss of zero.
TEST(HardCases, OneTrainedTokenInTheBatch) {
  Problem problem = problem_of(2 * world().size(), 16);
  for (Row& row: problem.rows) std::ranges::fill(row.labels, -100);
  problem.rows[2].labels[5] = 9;
  const Outcome expected = run_alone(problem, Rule::sgd, 3);
  EXPECT_GT(expected.norm, 0);
  for (const Layout& layout: expert_layouts()) expect_same(problem, layout, 3, expected);
}

// Each context-parallel chunk is one token.
TEST(HardCases, ARowOfTwoTokensForEachRank) {
  const Problem problem = problem_of(2, 2 * world().size());
  const Outcome expected = run_alone(problem, Rule::sgd, 1);
  expect_same(problem, {.shape = {.cp = world().size()}}, 1, expected);
}

TEST(HardCases, OneStageWithOneMicroBatch) {
  const Problem problem = problem_of(world().size(), 16);
  const Outcome expected = run_alone(problem, Rule::sgd, 3);
  expect_same(problem, {}, 3, expected);
  expect_same(problem, {.shape = {.ep = 2}, .mode = ShardMode::reshard}, 3, expected);
}

// A first stage of embedding and head alone, a middle chunk without layers.
TEST(HardCases, ChunksWithoutLayers) {
  const Problem problem = problem_of(2 * world().size(), 16);
  const Outcome expected = run_alone(problem, Rule::sgd, 1);
  for (const std::vector<int64_t>& chunks:
    {std::vector<int64_t>{0, 3, 0, 0}, {0, 0, 3, 0}, {1, 0, 1, 1}})
    expect_same(problem, {.shape = {.pp = 2}, .chunks = chunks}, 1, expected);
  EXPECT_PRED2(contains, error_text([] {
    const MeshShape shape{.pp = 2};
    (void)model_part({3, 0, 0, 0}, shape, mesh_place(shape, 2, 1), problem_of(4, 16).model());
  }),
    "stage 1 of 2 would hold no layer");
  EXPECT_PRED2(contains, error_text([] {
    const MeshShape shape{.pp = 2, .head_share = 0.5};
    Qwen3MoeConfig tied = problem_of(4, 16).model();
    tied.tie_embeddings = true;
    (void)model_part({3, 0, 0, 0}, shape, mesh_place(shape, 2, 0), tied);
  }),
    "parallel.head_share 0.5: a head tied to the embedding stays on one stage");
}

TEST(HardCases, TooFewMicroBatchesForThePipeline) {
  const Problem problem = problem_of(3, 16);
  const Mesh mesh = make_mesh({.pp = 2}, world(), device());
  EXPECT_PRED2(contains, error_text([&] {
    run(problem, {.shape = {.pp = 2}}, mesh, cut(problem.rows, 1, device()), Rule::none, 1);
  }),
    "a pipeline of 2 ranks needs at least 4 micro-batches a step, there are 3");
}

} // namespace
} // namespace pith::test
