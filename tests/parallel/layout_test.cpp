// The layout suite, of every family: routes, losses, norm, every gradient and the trained weights
// of a tiny model on every layout of this many processes equal those of one process.
// PITH_LAYOUTS=all runs every combination, otherwise a covering part.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>

#include "engine/context_parallel.h"
#include "engine/sharding.h"
#include "tests/engine/tiny_model.h"
#include "tests/parallel/world.h"

namespace pith {
namespace {

using test::world;

constexpr int64_t kRows = 32, kLength = 24, kLayers = 5;

template <class Model>
nlohmann::json layout_config() {
  auto config = std::is_same_v<Model, DeepseekV2Model> ? tiny_deepseek_config() : tiny_config();
  config["num_hidden_layers"] = kLayers;
  config[std::is_same_v<Model, DeepseekV2Model> ? "n_routed_experts" : "num_experts"] = 8;
  return config;
}

enum class Rule { none, sgd, adamw };

struct Outcome {
  double loss = 0, balance = 0, norm = 0;
  std::map<std::string, Tensor> grads;    // by Hugging Face name, of the first step; this rank's
  std::map<std::string, Tensor> weights;  // masters after the last step; parts, in order
  std::vector<std::vector<Tensor>> topk_idx;  // [micro-batch][layer]
};

struct Layout {
  MeshShape shape;
  ShardMode mode = ShardMode::keep;
  int64_t micro_batch = 1;
};

// Runs `steps` steps of a part of the batch and reduces as training does.
template <class Model>
Outcome run(const Mesh& mesh, ShardMode mode, const std::vector<MicroBatch>& batches, Rule rule,
    int64_t steps) {
  const auto config = Model::Config::parse(layout_config<Model>(), "test");
  const auto chunks = default_chunks(config, mesh.shape, kLength);
  const ModelPart part = model_part(chunks, mesh.shape, mesh.place, config.num_experts);
  Model model(config, part);
  auto groups =
      make_shard_groups(model.parameter_units(), at::kFloat, mesh, ShardGroup::Use::training, mode);
  const ModelShards shards(groups, part, part.head ? &model.head_weight() : nullptr);
  for (ShardGroup& group : groups) group.initialize(7, 0.1, config.num_layers);
  Pipeline<Model> pipeline(model, mesh, 512, {0.1, false}, chunks, &shards);
  Outcome out;
  RunConfig::Training training;
  for (int64_t step = 1; step <= steps; ++step) {
    zero_grads(groups);
    std::vector<RoutingTape> tapes(batches.size());
    const BatchResult result = pipeline.forward_backward(batches, NextTokenLoss(), tapes);
    finish_step(groups);
    const Tensor norm = grad_norm(groups, mesh);
    if (step == 1) {
      Tensor sums = at::zeros({2}, at::TensorOptions(mesh.device).dtype(at::kDouble));
      if (result.loss_sum.defined()) sums[0] += result.loss_sum.item<double>();
      if (result.balance_sum.defined()) sums[1] += result.balance_sum.item<double>();
      mesh.world.all_reduce(sums);
      out.loss = sums[0].item<double>();
      out.balance = sums[1].item<double>();
      out.norm = norm.item<double>();
      for (const RoutingTape& tape : tapes) out.topk_idx.push_back(tape.topk_idx);
      for (const ShardGroup& group : groups)
        for (const auto& piece : group.pieces())
          out.grads[fmt::format("{}@{}", piece.tensor->name, piece.first)] =
              group.grad_part.narrow(0, piece.begin, piece.count).clone().cpu();
    }
    if (rule == Rule::adamw) optimizer_step(groups, training, 1e-3, step, norm);
    for (ShardGroup& group : groups) {
      if (rule != Rule::sgd) continue;
      group.master.sub_(group.grad_part * 0.1);
      group.publish();
    }
  }
  for (const ShardGroup& group : groups)
    for (const auto& piece : group.pieces())
      out.weights[fmt::format("{}@{}", piece.tensor->name, piece.first)] =
          group.master.narrow(0, piece.begin, piece.count).clone().cpu();
  return out;
}

// |part - the same range of the whole| over |whole|, the largest of all parts, with its name.
std::pair<double, std::string> largest_error(
    const std::map<std::string, Tensor>& parts, const std::map<std::string, Tensor>& whole) {
  std::pair<double, std::string> worst{0, "none"};
  EXPECT_FALSE(parts.empty());
  for (const auto& [name, part] : parts) {
    const auto at = name.find('@');
    const Tensor& all = whole.at(name.substr(0, at) + "@0");
    const Tensor same = all.narrow(0, std::stoll(name.substr(at + 1)), part.numel());
    const double norm = all.norm().item<double>();
    const double error = (part - same).norm().item<double>() / (norm > 0 ? norm : 1);
    if (!(error <= worst.first)) worst = {error, name};
  }
  return worst;
}

// Micro-batch m of data-parallel rank d holds rows (m * dp + d) * micro_batch and the next.
std::vector<MicroBatch> batches_of(
    const std::vector<Row>& rows, int64_t micro_batch, const Mesh& mesh) {
  const std::vector<MicroBatch> all = cut(rows, micro_batch);
  std::vector<MicroBatch> mine;
  for (auto i = static_cast<size_t>(mesh.place.dp); i < all.size();
      i += static_cast<size_t>(mesh.dp))
    mine.push_back(all[i]);
  return mine;
}

// `stride`: one of so many, 1 for all. It should divide no axis' count of values, so that all of
// these are met.
std::vector<Layout> layouts(int64_t size, size_t stride) {
  std::vector<Layout> list;
  for (const int64_t pp : {1, 2, 4}) {
    for (const int64_t cp : {1, 2}) {
      for (const int64_t ep : {1, 2, 4}) {
        if (size % (pp * cp) != 0 || size / pp % ep != 0) continue;
        for (const int64_t block : {int64_t{0}, ep, 2 * ep}) {  // 0: fsdp
          if (block != 0 && (size / pp % block != 0 || block == size / pp)) continue;
          for (const ShardMode mode : {ShardMode::keep, ShardMode::reshard}) {
            for (const int64_t micro_batch : {1, 2}) {
              const bool enough = kRows / micro_batch * pp * cp / size >= 2 * pp;
              if (!enough && pp > 1) continue;
              list.push_back({{pp, cp, ep, block != 0, block}, mode, micro_batch});
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

template <class Model>
void check_layouts(size_t stride) {
  const char* wanted = std::getenv("PITH_LAYOUTS");
  const bool all = wanted != nullptr && std::string(wanted) == "all";
  const std::vector<Row> rows = ragged_rows(kRows, kLength, 61);
  const Mesh alone;
  const auto whole_batch = cut(rows, 1);
  const Outcome expected = run<Model>(alone, ShardMode::keep, whole_batch, Rule::sgd, 3);
  const Outcome adamw = run<Model>(alone, ShardMode::keep, whole_batch, Rule::adamw, 3);
  const std::vector<Layout> list = layouts(world().size(), all ? 1 : stride);
  ASSERT_FALSE(list.empty());
  for (const Layout& layout : list) {
    const Mesh mesh = make_mesh(layout.shape, world(), test::device());
    const std::string name = fmt::format("pp {} dp {} cp {} ep {} hsdp {} {} micro-batch {}",
        layout.shape.pp, mesh.dp, layout.shape.cp, layout.shape.ep, layout.shape.hsdp_size,
        layout.mode == ShardMode::keep ? "keep" : "reshard", layout.micro_batch);
    SCOPED_TRACE(name);
    auto batches = batches_of(rows, layout.micro_batch, mesh);
    std::vector<Tensor> mine;  // which of the whole micro-batch's tokens are here
    for (MicroBatch& batch : batches) {
      MicroBatch numbered = batch;
      numbered.tokens = at::arange(batch.num_tokens(), at::kLong);
      const int64_t cp = layout.shape.cp;
      mine.push_back(split_context(numbered, mesh.place.cp, cp, at::kCPU).tokens);
      batch = split_context(batch, mesh.place.cp, cp, mesh.device);
    }
    const Outcome got = run<Model>(mesh, layout.mode, batches, Rule::sgd, 3);
    for (size_t m = 0; m < batches.size(); ++m) {
      for (size_t layer = 0; layer < kLayers; ++layer) {
        if (!got.topk_idx[m][layer].defined()) continue;
        std::vector<Tensor> parts;
        for (int64_t i = 0; i < layout.micro_batch; ++i) {
          const auto row =
              (static_cast<int64_t>(m) * mesh.dp + mesh.place.dp) * layout.micro_batch + i;
          parts.push_back(expected.topk_idx[static_cast<size_t>(row)][layer]);
        }
        ASSERT_TRUE(
            at::equal(got.topk_idx[m][layer].cpu(), at::cat(parts).cpu().index_select(0, mine[m])))
            << "layer " << layer;
      }
    }
    EXPECT_NEAR(got.loss, expected.loss, 1e-5 * expected.loss);
    EXPECT_NEAR(got.balance, expected.balance, 1e-5 * expected.balance);
    EXPECT_NEAR(got.norm, expected.norm, 1e-5 * expected.norm);
    const auto grads = largest_error(got.grads, expected.grads);
    EXPECT_LT(grads.first, 1e-5) << "gradient of " << grads.second;
    const auto sgd = largest_error(got.weights, expected.weights);
    EXPECT_LT(sgd.first, 1e-6) << "after SGD " << sgd.second;
    const Outcome trained = run<Model>(mesh, layout.mode, batches, Rule::adamw, 3);
    const auto weights = largest_error(trained.weights, adamw.weights);
    EXPECT_LT(weights.first, 1e-3) << "after AdamW " << weights.second;
  }
}

TEST(Layout, EveryLayoutComputesTheSame) {
  check_layouts<Qwen3MoeModel>(world().size() < 8 ? 3 : 5);
}
// The engine is the same for all families: of a second one fewer layouts show what is its own.
TEST(Layout, EveryLayoutComputesTheSameOfDeepseekV2) {
  check_layouts<DeepseekV2Model>(world().size() < 8 ? 9 : 17);
}

}  // namespace
}  // namespace pith
