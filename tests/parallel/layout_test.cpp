// The layout suite: routes, loss, balance loss and every gradient of a tiny model on every layout
// of this many processes equal those of one process.
#include <ATen/ops/equal.h>

#include "engine/sharding.h"
#include "tests/engine/tiny_model.h"
#include "tests/parallel/world.h"

namespace pith {
namespace {

using test::world;

nlohmann::json layout_config() {
  auto config = tiny_config();
  config["num_hidden_layers"] = 5;
  config["num_experts"] = 8;
  return config;
}

struct Outcome {
  double loss = 0, balance = 0;
  std::map<std::string, Tensor> grads;        // by Hugging Face name
  std::vector<std::vector<Tensor>> topk_idx;  // [micro-batch][layer]
};

// Runs one step and sums over ranks what a step sums over ranks.
Outcome run(const Mesh& mesh, const std::vector<int64_t>& chunks,
            const std::vector<MicroBatch>& batches, bool whole) {
  const auto config = Qwen3MoeConfig::parse(layout_config(), "test");
  Qwen3MoeModel model(config, whole
                                  ? whole_model(config.num_layers, config.num_experts)
                                  : model_part(chunks, mesh.shape, mesh.place, config.num_experts));
  auto groups = make_shard_groups(model.parameter_units(), at::kFloat, mesh.device,
                                  ShardGroup::Use::training);
  for (ShardGroup& group : groups) group.initialize(7, 0.1, config.num_layers);
  zero_grads(groups);
  Pipeline<Qwen3MoeModel> pipeline(model, mesh, 512, {0.1, false}, chunks);
  std::vector<RoutingTape> tapes(batches.size());
  const BatchResult result = pipeline.forward_backward(batches, NextTokenLoss(), tapes);
  Outcome out;
  Tensor sums = at::zeros({2}, at::kDouble);
  if (result.loss_sum.defined()) sums[0] += result.loss_sum.item<double>();
  if (result.balance_sum.defined()) sums[1] += result.balance_sum.item<double>();
  mesh.world.all_reduce(sums);
  out.loss = sums[0].item<double>();
  out.balance = sums[1].item<double>();
  for (Parameter* parameter : all_parameters(groups)) {
    const bool expert = parameter->group == ParameterGroup::expert;
    (expert ? mesh.expert_data : mesh.plane).all_reduce(parameter->grad);
    for (const HfTensor& tensor : parameter->tensors)
      out.grads[tensor.name] = Parameter::view_of(parameter->grad, tensor).clone();
  }
  for (const RoutingTape& tape : tapes) out.topk_idx.push_back(tape.topk_idx);
  return out;
}

// Micro-batch m of data-parallel rank d holds rows (m * dp + d) * micro_batch and the next.
std::vector<MicroBatch> batches_of(const std::vector<Row>& rows, int64_t micro_batch, int64_t dp,
                                   int64_t dp_rank) {
  const std::vector<MicroBatch> all = cut(rows, micro_batch);
  std::vector<MicroBatch> mine;
  for (size_t i = static_cast<size_t>(dp_rank); i < all.size(); i += static_cast<size_t>(dp))
    mine.push_back(all[i]);
  return mine;
}

TEST(Layout, EveryLayoutComputesTheSame) {
  const int64_t size = world().size();
  const std::vector<Row> rows = ragged_rows(32, 24, 61);
  const Mesh alone;
  const Outcome expected = run(alone, {5, 0}, cut(rows, 1), true);
  for (const int64_t pp : {1, 2, 4}) {
    for (const int64_t ep : {1, 2, 4}) {
      if (size % pp != 0 || (size / pp) % ep != 0) continue;
      for (const int64_t micro_batch : {1, 2}) {
        const MeshShape shape{.pp = pp, .ep = ep};
        const Mesh mesh = make_mesh(shape, world(), test::device());
        if (rows.size() / static_cast<size_t>(micro_batch * mesh.dp) <
            static_cast<size_t>(pp > 1 ? 2 * pp : 1))
          continue;
        const std::string name =
            fmt::format("pp {} dp {} ep {} micro-batch {}", pp, mesh.dp, ep, micro_batch);
        const auto chunks =
            default_chunks(Qwen3MoeConfig::parse(layout_config(), "test"), mesh.shape, 24);
        const auto batches = batches_of(rows, micro_batch, mesh.dp, mesh.place.dp);
        const Outcome got = run(mesh, chunks, batches, false);
        for (size_t m = 0; m < batches.size(); ++m) {
          for (size_t layer = 0; layer < 5; ++layer) {
            if (!got.topk_idx[m][layer].defined()) continue;
            std::vector<Tensor> parts;
            for (int64_t i = 0; i < micro_batch; ++i) {
              const auto row =
                  (static_cast<int64_t>(m) * mesh.dp + mesh.place.dp) * micro_batch + i;
              parts.push_back(expected.topk_idx[static_cast<size_t>(row)][layer]);
            }
            ASSERT_TRUE(at::equal(got.topk_idx[m][layer], at::cat(parts))) << name;
          }
        }
        EXPECT_NEAR(got.loss, expected.loss, 1e-5 * expected.loss) << name;
        EXPECT_NEAR(got.balance, expected.balance, 1e-5 * expected.balance) << name;
        for (const auto& [tensor, grad] : got.grads)
          EXPECT_LT(relative_error(grad, expected.grads.at(tensor)), 1e-5) << name << " " << tensor;
      }
    }
  }
}

}  // namespace
}  // namespace pith
