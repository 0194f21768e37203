// The layout suite: what a tiny model computes on layouts of this many processes equals what one
// process computes. PITH_LAYOUTS=all runs every combination, PITH_LAYOUTS="pp 2 cp 1 ep 4" those
// whose name (Layout::name) has these words, otherwise a covering part. PITH_LAYOUT_SEED=N draws
// other random layouts of other random models, more of them.
#include "tests/parallel/layout.h"
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fmt/ranges.h>
#include <random>

namespace pith::test {
namespace {
constexpr int64_t kRows = 32, kLength = 24;

// Five layers: no number of chunks divides them. An odd vocabulary.
Problem usual_problem(nlohmann::json config = tiny_config()) {
  config["num_hidden_layers"] = 5;
  if (config.contains("num_experts")) config["num_experts"] = 8; // as the others have
  return {config, ragged_rows(kRows, kLength, 61)};
}

// One of `stride` layouts, 1 for all. It should divide no axis' count of values, so that all of
// these are met.
std::vector<Layout> layouts(int64_t size, size_t stride) {
  std::vector<Layout> list;
  for (const int64_t pp: {1, 2, 4}) {
    for (const int64_t cp: {1, 2}) {
      for (const int64_t ep: {1, 2, 4}) {
        if (size % (pp * cp) != 0 || size / pp % ep != 0) continue;
        for (const int64_t block: {int64_t{0}, ep, 2 * ep}) { // 0: fsdp
          if (block != 0 && (size / pp % block != 0 || block == size / pp)) continue;
          for (const ShardMode mode: {ShardMode::keep, ShardMode::reshard}) {
            for (const int64_t micro_batch: {1, 2}) {
              const bool enough = kRows / micro_batch * pp * cp / size >= 2 * pp;
              if (!enough && pp > 1) continue;
              const double head_share = pp > 1 && micro_batch == 2 ? 0.3 : 0;
              list.push_back({{pp, cp, ep, block != 0, block, head_share}, mode, micro_batch});
            }
          }
        }
      }
    }
  }
  std::vector<Layout> some;
  for (size_t i = 0; i < list.size(); i += stride) some.push_back(list[i]);
  return some;
}

void check_layouts(const Problem& problem, size_t stride) {
  const char* wanted = std::getenv("PITH_LAYOUTS");
  const Outcome sgd = run_alone(problem, Rule::sgd, 3), adamw = run_alone(problem, Rule::adamw, 3);
  std::vector<Layout> list = layouts(world().size(), wanted != nullptr ? 1 : stride);
  if (wanted != nullptr && std::string(wanted) != "all")
    std::erase_if(list, [&](const Layout& it) { return !contains(it.name(), wanted); });
  ASSERT_FALSE(list.empty());
  for (const Layout& layout: list) expect_same(problem, layout, 3, sgd, &adamw);
}

TEST(Layout, EveryLayoutComputesTheSame) {
  check_layouts(usual_problem(), world().size() < 8 ? 3 : 5);
}
// The engine is the same for all families: of a second one fewer layouts show what is its own.
TEST(Layout, EveryLayoutComputesTheSameOfDeepseekV2) {
  check_layouts(usual_problem(tiny_deepseek_config()), world().size() < 8 ? 7 : 13);
}
TEST(Layout, EveryLayoutComputesTheSameOfGptOss) {
  check_layouts(usual_problem(tiny_gpt_oss_config()), world().size() < 8 ? 7 : 13);
}
TEST(Layout, EveryLayoutComputesTheSameOfQwen35) {
  check_layouts(usual_problem(tiny_qwen35_config()), world().size() < 8 ? 11 : 17);
}

// Recomputed layers: with experts, stages and rows that are cut.
void check_recomputed(Problem problem) {
  problem.rows = ragged_rows(4 * world().size(), kLength, 61);
  const Outcome expected = run_alone(problem, Rule::sgd, 1);
  for (const Layout& layout: {Layout{{.ep = 2}}, {{.pp = 2}, ShardMode::reshard, 2},
         {{.cp = 2, .ep = 2}, ShardMode::reshard},
         {{.pp = 2, .ep = std::min<int64_t>(2, world().size() / 2)}}}) {
    Layout again = layout;
    again.recompute = true;
    expect_same(problem, again, 1, expected);
  }
}

TEST(Layout, RecomputedActivationsGiveTheSameGradients) { check_recomputed(usual_problem()); }
TEST(Layout, RecomputedActivationsGiveTheSameGradientsOfDeepseekV2) {
  check_recomputed(usual_problem(tiny_deepseek_config()));
}
TEST(Layout, RecomputedActivationsGiveTheSameGradientsOfGptOss) {
  check_recomputed(usual_problem(tiny_gpt_oss_config()));
}
TEST(Layout, RecomputedActivationsGiveTheSameGradientsOfQwen35) {
  check_recomputed(usual_problem(tiny_qwen35_config()));
}

struct PeakMemory : c10::MemoryReportingInfoBase {
  int64_t now = 0, peak = 0;
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    peak = std::max(peak, now += bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
};

// In one process the gradients are the same to the bit.
template <class Model> void check_kept(nlohmann::json config) {
  config["num_hidden_layers"] = 8;
  const std::vector<MicroBatch> batches = cut(ragged_rows(1, 512, 61), 1);
  std::vector<int64_t> peaks;
  std::vector<Tensor> grads;
  double balance = 0;
  for (const bool recompute: {false, true}) {
    TinyModelOf<Model> tiny(config);
    zero_grads(tiny.groups);
    Pipeline<Model> pipeline(tiny.model, tiny.mesh, 512, {0.1, false}, {}, nullptr, recompute);
    const auto memory = std::make_shared<PeakMemory>();
    std::vector<RoutingTape> tapes(1);
    {
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
      const BatchResult result = pipeline.forward_backward(batches, NextTokenLoss(), tapes);
      EXPECT_EQ(result.num_moe_layers, 7);
      if (recompute) { EXPECT_EQ(result.balance_sum.template item<double>(), balance); }
      balance = result.balance_sum.template item<double>();
    }
    EXPECT_TRUE(tapes[0].topk_weight[7].defined());
    peaks.push_back(memory->peak);
    for (const ShardGroup& group: tiny.groups) grads.push_back(group.grads.clone());
  }
  EXPECT_GT(peaks[1], 0);
  EXPECT_LT(peaks[1], peaks[0] / 2);
  for (size_t i = 0; 2 * i < grads.size(); ++i)
    EXPECT_TRUE(at::equal(grads[i], grads[i + grads.size() / 2])) << "group " << i;
}

TEST(Layout, RecomputedLayersKeepTheirInputsOnly) {
  check_kept<Qwen3MoeModel>(tiny_config());
  check_kept<DeepseekV2Model>(tiny_deepseek_config());
}

// --- random ones ---

struct Draw {
  std::mt19937_64 bits;
  int64_t operator()(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
};

// A layout that this many processes allow, and a model and a batch that it can work on.
std::pair<Problem, Layout> draw_case(Draw& draw, int64_t size) {
  Problem problem;
  Layout layout;
  int64_t plane = 0;
  MeshShape& shape = layout.shape;
  do {
    shape = {int64_t{1} << draw(0, 2), int64_t{1} << draw(0, 2), int64_t{1} << draw(0, 3)};
    plane = size / shape.pp;
  } while (size % (shape.pp * shape.cp) != 0 || plane % shape.ep != 0);
  const int64_t block = shape.ep << draw(0, 2);
  shape.hsdp = draw(0, 1) == 1 && block < plane && plane % block == 0;
  shape.hsdp_size = shape.hsdp ? block : 0;
  layout.mode = draw(0, 1) == 1 ? ShardMode::reshard : ShardMode::keep;
  layout.micro_batch = draw(1, 2);
  layout.recompute = draw(0, 3) == 0;

  problem.config = tiny_config();
  const int64_t layers = draw(shape.pp, 6), experts = shape.ep * draw(1, 3);
  problem.config["num_hidden_layers"] = layers;
  problem.config["num_experts"] = experts;
  problem.config["num_experts_per_tok"] = draw(1, std::min<int64_t>(experts, 4));
  problem.config["num_key_value_heads"] = 1 << draw(0, 2);
  problem.config["moe_intermediate_size"] = draw(3, 30);
  problem.config["norm_topk_prob"] = draw(0, 1) == 1;
  problem.config["tie_word_embeddings"] = draw(0, 1) == 1;
  if (shape.pp > 1 && !problem.config["tie_word_embeddings"].get<bool>())
    shape.head_share = static_cast<double>(draw(0, 9)) / 10;
  problem.config["mlp_only_layers"] = {draw(0, layers)}; // one that is not there: none
  const int64_t vocab = draw(20, 90);
  problem.config["vocab_size"] = vocab;
  problem.config["eos_token_id"] = vocab - 1;
  const int64_t batches = shape.pp == 1 ? draw(1, 4) : 2 * shape.pp + draw(0, 2);
  const int64_t rows = batches * layout.micro_batch * plane / shape.cp;
  problem.rows = ragged_rows(rows, 2 * shape.cp * draw(1, 8), vocab, draw.bits());

  if (shape.pp * shape.ep > 1 && draw(0, 1) == 1) { // any cut that gives each later stage a layer
    layout.chunks.assign(static_cast<size_t>(2 * shape.pp), 0);
    for (int64_t i = 0; i < layers; ++i) {
      const int64_t stage = i < shape.pp - 1 ? i + 1 : draw(0, shape.pp - 1);
      const int64_t chunk = draw(0, 1) == 1 ? stage : 2 * shape.pp - 1 - stage;
      ++layout.chunks[static_cast<size_t>(chunk)];
    }
  } else {
    layout.chunks = default_chunks(problem.model(), shape, problem.length());
  }
  return {problem, layout};
}

// The least difference between router logits that decides a route or its order: where it is within
// the rounding of FP32, another order of summation may rightly choose otherwise.
double smallest_margin(const Problem& problem) {
  TinyModel tiny(problem.config);
  std::map<std::string, Tensor> routers;
  for (const Parameter* parameter: all_parameters(tiny.groups))
    if (parameter->group == ParameterGroup::router)
      routers[parameter->name] = parameter->value.detach();
  const int64_t k = problem.model().experts_per_token;
  double margin = 1;
  auto pipeline = tiny.pipeline();
  pipeline.observe([&](const std::string& name, const Tensor& rows) {
    if (!name.ends_with(".attend.rows")) return;
    const auto found =
      routers.find(name.substr(0, name.size() - strlen("attend.rows")) + "mlp.gate.weight");
    if (found == routers.end()) return;
    const Tensor logits = std::get<0>(rows.matmul(found->second.t()).sort(1, true));
    const int64_t pairs = std::min(k, logits.size(1) - 1);
    if (pairs == 0) return;
    const Tensor steps = logits.narrow(1, 0, pairs) - logits.narrow(1, 1, pairs);
    margin = std::min(margin, steps.min().item<double>());
  });
  pipeline.forward_only(cut(problem.rows, 1), NextTokenLoss());
  EXPECT_LE(routers.size(), static_cast<size_t>(problem.model().num_layers));
  return margin;
}

TEST(Layout, RandomLayoutsOfRandomModels) {
  const char* seed = std::getenv("PITH_LAYOUT_SEED");
  Draw draw{std::mt19937_64(seed != nullptr ? std::stoull(seed) : 1)};
  for (int64_t i = 0; i < (seed != nullptr ? 40 : 6); ++i) {
    auto [problem, layout] = draw_case(draw, world().size());
    while (smallest_margin(problem) < 1e-5)
      problem.rows = ragged_rows(
        std::ssize(problem.rows), problem.length(), problem.model().vocab_size, draw.bits());
    SCOPED_TRACE(
      fmt::format("PITH_LAYOUT_SEED={}, case {}: {} rows of {}, {}", seed != nullptr ? seed : "1",
        i, problem.rows.size(), problem.length(), problem.config.dump()));
    expect_same(problem, layout, 1, run_alone(problem, Rule::sgd, 1));
  }
}

} // namespace
} // namespace pith::test
