// Sharding, the optimizer and checkpoints over several processes against one process that holds
// everything. Gradients are small whole numbers, so sums in any order are exact and everything must
// be equal bit for bit.
#include "engine/sharding.h"
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>
#include <filesystem>
#include <optional>
#include "core/random.h"
#include "engine/checkpoint.h"
#include "engine/optimizer.h"
#include "models/model.h"
#include "operators/linear.h"
#include "tests/parallel/world.h"

namespace pith::test {
namespace {
namespace fs = std::filesystem;

constexpr int64_t kExperts = 4, kLayers = 2;
constexpr int64_t kSources = 8; // where gradients come from: spread over the ranks of the plane

// What a model is to sharding: units of parameters, sizes that no number of ranks divides.
struct Units {
  std::deque<Parameter> own;
  std::vector<std::vector<Parameter*>> units;
  ModelPart part;

  Units(const ModelPart& its_part, const RunConfig::Training& training) : part(its_part) {
    if (part.embedding) {
      units.emplace_back();
      add({"embed", {61, 8}, ParameterGroup::embedding, Init::normal});
    }
    for (const int64_t layer: part.layers) {
      units.emplace_back();
      const std::string at = fmt::format("layers.{}.", layer);
      add({at + "norm", {7}, ParameterGroup::norm, Init::ones});
      add({at + "qkv", {13, 9}, {{at + "q", {8, 9}, 0}, {at + "k", {5, 9}, 72}},
        ParameterGroup::matrix, Init::normal});
      add({at + "router", {5, 9}, ParameterGroup::router, Init::normal});
      std::vector<HfTensor> experts;
      for (int64_t e = part.expert_begin; e < part.expert_end; ++e)
        experts.push_back(
          {fmt::format("{}experts.{}.up", at, e), {3, 11}, std::ssize(experts) * 33});
      add({at + "experts", {std::ssize(experts), 3, 11}, experts, ParameterGroup::expert,
        Init::output_normal});
      const auto of_all = [&](const char* name, int64_t rows, int64_t columns, Fused fused) {
        const std::vector<int64_t> shape{part.expert_end - part.expert_begin, rows, columns};
        add({at + name, shape, {{at + name, shape, 0, part.expert_begin, kExperts, fused}},
          ParameterGroup::expert, Init::normal});
      };
      of_all("halves", 6, 7, Fused::rows);
      of_all("columns", 5, 10, Fused::columns);
    }
    if (part.head) {
      units.emplace_back();
      add({"norm", {9}, ParameterGroup::norm, Init::ones});
      add({"head", {61, 9}, ParameterGroup::embedding, Init::normal});
    }
    const ModelPart all{{0, 1}, true, true, 0, kExperts};
    if (part.layers == all.layers && part.expert_end - part.expert_begin == kExperts)
      set_update_rules(units, units, training);
    else // some patterns match tensors of other ranks only
      set_update_rules(units, Units(all, training).units, training);
  }
 private:
  void add(Parameter parameter) { units.back().push_back(&own.emplace_back(std::move(parameter))); }
};

// This rank's part of the layout; layers are dealt out to the stages.
ModelPart part_of(const Mesh& mesh) {
  ModelPart part{{}, mesh.place.pp == 0, mesh.place.pp == 0, 0, 0};
  for (int64_t layer = mesh.place.pp; layer < kLayers; layer += mesh.pipeline.size())
    part.layers.push_back(layer);
  const int64_t experts = kExperts / mesh.expert.size();
  part.expert_begin = mesh.expert.rank() * experts;
  part.expert_end = part.expert_begin + experts;
  return part;
}

// AdamW; and everything else: Muon, a fused parameter's tensors apart, BF16 moments, averages.
std::vector<RunConfig::Training> trainings() {
  std::vector<RunConfig::Training> both(2);
  for (RunConfig::Training& training: both) training.clip_norm = 1;
  both[1].optimizer = "muon";
  both[1].moments = "bfloat16";
  both[1].ema_decay = 0.75;
  both[1].groups = {{"\\.k$", "adamw", 0.5, 0.3}, {"experts\\.1", "", 2}, {"router", "muon"}};
  return both;
}

struct Trained {
  RunConfig::Training training;
  Mesh mesh;
  Units units;
  std::vector<ShardGroup> groups;
  ModelShards shards;
  std::vector<double> norms;

  Trained(const Mesh& its_mesh, ShardMode mode, at::ScalarType dtype,
    const RunConfig::Training& its_training = trainings()[0])
      : training(its_training), mesh(its_mesh), units(part_of(mesh), training),
        groups(make_shard_groups(
          units.units, dtype, mesh, ShardGroup::Use::training, mode, optimizer_states(training))),
        shards(groups, units.part, nullptr) {
    for (ShardGroup& group: groups) group.initialize(7, 0.1, kLayers);
  }

  // The gradient of one Hugging Face tensor from one source.
  static Tensor gradient(
    const HfTensor& tensor, int64_t step, int64_t micro_batch, int64_t source) {
    Tensor gradient = at::empty(tensor.shape, on_device(at::kFloat));
    fill_normal(gradient, static_cast<uint64_t>(100 * step + 10 * micro_batch + source),
      tensor.name, 4, tensor.first_element());
    return gradient.round_();
  }

  void backward(int64_t unit, int64_t step, int64_t micro_batch) {
    for (Parameter* parameter: units.units[static_cast<size_t>(unit)]) {
      ASSERT_FALSE(parameter->value.isnan().any().item<bool>());
      // The experts of a rank see the sources of its whole expert group.
      const bool expert = parameter->group == ParameterGroup::expert;
      std::vector<int64_t> ranks = expert ? mesh.expert.ranks() : std::vector<int64_t>{-1};
      for (int64_t& rank: ranks) {
        rank = expert ? std::ranges::find(mesh.plane.ranks(), rank) - mesh.plane.ranks().begin()
                      : mesh.plane.rank();
        for (int64_t source = rank; source < kSources; source += mesh.plane.size()) {
          for (const HfTensor& tensor: parameter->tensors)
            Parameter::view_of(parameter->grad, tensor)
              .add_(gradient(tensor, step, micro_batch, source));
        }
      }
    }
  }

  // As the pipeline does it: two micro-batches, layers in order, back in reverse.
  void step(int64_t step) {
    std::vector<const UnitShards*> order{&shards.embedding};
    for (const auto& [layer, unit]: shards.layers) order.push_back(&unit);
    order.push_back(&shards.head);
    std::erase_if(order, [](const UnitShards* unit) { return unit->groups.empty(); });
    zero_grads(groups);
    for (const int64_t micro_batch: {0, 1}) {
      for (const UnitShards* unit: order) {
        unit->before_forward();
        unit->after_forward();
      }
      for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
        (*unit)->before_backward();
        if (unit + 1 != order.rend()) unit[1]->prefetch();
        backward(std::ssize(units.units) - 1 - (*unit)->groups[0]->unit(), step, micro_batch);
        (*unit)->after_backward(micro_batch == 1);
      }
    }
    const Tensor norm = grad_norm(groups, mesh);
    norms.push_back(norm.item<double>());
    optimizer_step(groups, training, 1e-2, step, norm);
  }
};

// Value, master, moments and average of a piece: views.
std::vector<Tensor> states_of(const ShardGroup& group, const ShardGroup::Piece& piece) {
  const auto part = [&](const Tensor& x, int64_t begin) { return x.narrow(0, begin, piece.count); };
  std::vector<Tensor> all{part(group.value_part, piece.begin), part(group.master, piece.begin),
    part(group.exp_avg, piece.begin)};
  const int64_t second = group.second_moment_at(piece.begin);
  EXPECT_EQ(second < 0, piece.tensor->rule.muon) << piece.tensor->name;
  if (second >= 0) all.push_back(part(group.exp_avg_sq, second));
  if (group.ema.defined()) all.push_back(part(group.ema, piece.begin));
  return all;
}

// Everything that one process holds, by Hugging Face name, flat.
using State = std::map<std::string, std::vector<Tensor>>;

State state_of(Trained& trained) {
  State state;
  for (ShardGroup& group: trained.groups) {
    for (const ShardGroup::Piece& piece: group.pieces()) {
      EXPECT_EQ(piece.count, piece.tensor->numel());
      for (const Tensor& view: states_of(group, piece))
        state[piece.tensor->name].push_back(view.clone());
    }
  }
  return state;
}

// Every piece, and the gathered weights, are those of one process.
void expect_state(Trained& trained, const State& expected, const std::string& what) {
  int64_t owned = 0, different = 0;
  for (ShardGroup& group: trained.groups) {
    for (const ShardGroup::Piece& piece: group.pieces()) {
      const std::vector<Tensor> mine = states_of(group, piece),
                                &all = expected.at(piece.tensor->name);
      EXPECT_EQ(mine.size(), all.size()) << piece.tensor->name;
      for (size_t i = 0; i < mine.size(); ++i)
        different += at::equal(mine[i], all[i].narrow(0, piece.first, piece.count)) ? 0 : 1;
      owned += piece.count;
    }
    group.before_forward();
    for (const Parameter* parameter: group.parameters())
      for (const HfTensor& tensor: parameter->tensors)
        different +=
          at::equal(Parameter::view_of(parameter->value, tensor).view(-1),
            expected.at(tensor.name)[0].narrow(0, tensor.first_element(), tensor.numel()))
          ? 0
          : 1;
    group.after_forward();
  }
  EXPECT_EQ(different, 0) << what << ", rank " << world().rank();
  Tensor total = full({1}, static_cast<double>(owned), at::kDouble);
  trained.mesh.world.all_reduce(total);
  int64_t elements = 0;
  for (const auto& [name, tensors]: expected) elements += tensors[0].numel();
  const int64_t replicas = trained.mesh.dense_replicate.size();
  EXPECT_EQ(total.item<double>(), static_cast<double>(elements * replicas)) << what;
}

Mesh alone() {
  Mesh mesh;
  mesh.device = device();
  return mesh;
}

struct Layout {
  MeshShape shape;
  ShardMode mode;
  std::string name;
};

// All that this world allows: stages (of four, two hold nothing), experts, blocks, both modes.
std::vector<Layout> layouts() {
  std::vector<Layout> found;
  const int64_t n = world().size();
  for (const int64_t pp: {1, 2, 4}) {
    for (const int64_t ep: {1, 2, 4}) {
      for (const int64_t block: {0, 1, 2}) {
        for (const ShardMode mode: {ShardMode::keep, ShardMode::reshard}) {
          if (n % pp != 0 || n / pp % ep != 0 || n / pp > kSources) continue;
          if (block > 0 && (block % ep != 0 || n / pp % block != 0)) continue;
          const int64_t cp = n / pp % 2 == 0 ? 1 + std::ssize(found) % 2 : 1;
          found.push_back({{pp, cp, ep, block > 0, block}, mode,
            fmt::format("pp {} ep {} block {} {}", pp, ep, block,
              mode == ShardMode::keep ? "keep" : "reshard")});
        }
      }
    }
  }
  return found;
}

// A folder that all ranks know; rank 0 removes it.
struct SharedFolder {
  fs::path path;
  SharedFolder() {
    const Comm all = world().all();
    path = all.all_gather_strings(
      (fs::temp_directory_path() / fmt::format("pith-sharding-{}", getpid())).string())[0];
    if (all.rank() == 0) fs::remove_all(path);
    all.barrier();
  }
  ~SharedFolder() {
    world().all().barrier();
    if (world().rank() == 0) fs::remove_all(path);
  }
};

void save(Trained& trained, const fs::path& root, int64_t step) {
  CheckpointContent content;
  content.step = step;
  collect_state(trained.groups, content, trained.mesh.expert);
  content.training_state = "{}";
  CheckpointWriter writer;
  writer.start(root, std::move(content), 0, trained.mesh.world);
  writer.finish();
  trained.mesh.world.barrier();
}

TEST(Sharding, ThreeStepsEqualOneProcess) {
  for (const auto dtype: {at::kFloat, at::kBFloat16}) {
    for (const RunConfig::Training& training: trainings()) {
      Trained one(alone(), ShardMode::reshard, dtype, training);
      const State initial = state_of(one);
      for (int64_t step = 1; step <= 3; ++step) one.step(step);
      const State expected = state_of(one);
      for (const Layout& layout: layouts()) {
        const std::string what = layout.name + " " + training.optimizer;
        Trained many(make_mesh(layout.shape, world(), device()), layout.mode, dtype, training);
        expect_state(many, initial, what + ", initial");
        for (int64_t step = 1; step <= 3; ++step) many.step(step);
        EXPECT_EQ(many.norms, one.norms) << what;
        expect_state(many, expected, what);
      }
    }
  }
}

TEST(Sharding, WeightsHaveMemoryOnlyBetweenTheirVerbs) {
  if (world().size() == 1) GTEST_SKIP();
  Trained many(make_mesh({}, world(), device()), ShardMode::reshard, at::kFloat);
  const UnitShards& layer = many.shards.layers.at(0);
  Parameter& norm = *many.units.units[1][0];
  const Tensor leaf = norm.value;
  const auto bytes = [](const Tensor& tensor) { return tensor.storage().nbytes(); };
  EXPECT_EQ(bytes(leaf), 0u);
  layer.before_forward();
  EXPECT_EQ(leaf.sum().item<double>(), 7); // the leaf that a graph would hold is the same tensor
  layer.before_forward(); // another micro-batch
  layer.after_forward();
  EXPECT_EQ(leaf.sum().item<double>(), 7);
  EXPECT_EQ(bytes(norm.grad), 0u);
  layer.before_backward();
  norm.grad.add_(1);
  layer.after_forward();
  layer.after_backward();
  EXPECT_EQ(bytes(leaf), 0u);
  EXPECT_EQ(bytes(norm.grad), 0u);
  EXPECT_THROW(layer.after_forward(), Error);
  grad_norm(many.groups, many.mesh);
  double sum = 0;
  for (const auto& [parameter, tensor, first, begin, count]: many.groups[1].pieces())
    if (parameter == &norm)
      sum += many.groups[1].grad_part.narrow(0, begin, count).sum().item<double>();
  Tensor total = full({1}, sum, at::kDouble);
  many.mesh.world.all_reduce(total);
  EXPECT_EQ(total.item<double>(), 7.0 * static_cast<double>(world().size()));
}

// Autograd across release and gather: the graph holds the leaf, not its memory.
TEST(Sharding, ABackwardReadsWhatWasGatheredAgain) {
  Trained many(make_mesh({}, world(), device()), ShardMode::reshard, at::kFloat);
  const UnitShards& layer = many.shards.layers.at(0);
  Parameter& weight = *many.units.units[1][1]; // (13, 9)
  const Tensor x = arange(18, at::kFloat).view({2, 9}).requires_grad_();
  layer.before_forward();
  const Tensor copy = weight.value.detach().clone();
  const Tensor y = linear(x, weight);
  layer.after_forward();
  layer.before_backward();
  torch::autograd::backward({y.sum()});
  EXPECT_TRUE(at::allclose(x.grad(), copy.sum(0).expand({2, 9})));
  EXPECT_TRUE(at::equal(weight.grad, x.detach().sum(0).expand({13, 9})));
  layer.after_backward();
}

// Every layout saves, every other one and a single process load; training goes on as if nothing
// had happened.
TEST(Sharding, AnyLayoutLoadsWhatAnyLayoutSaved) {
  const SharedFolder folder;
  const RunConfig::Training training = trainings()[1];
  Trained one(alone(), ShardMode::keep, at::kBFloat16, training);
  one.step(1);
  const State expected = state_of(one);
  one.step(2);
  const State next = state_of(one);
  const std::vector<Layout> all = layouts();
  const Units whole({{0, 1}, true, true, 0, kExperts}, training);
  for (size_t i = 0; i < all.size(); ++i) {
    Trained saved(make_mesh(all[i].shape, world(), device()), all[i].mode, at::kBFloat16, training);
    saved.step(1);
    const fs::path root = folder.path / std::to_string(i), path = root / "step-00000001";
    save(saved, root, 1);
    EXPECT_TRUE(verify_checkpoint(path).empty()) << all[i].name;
    EXPECT_EQ(std::distance(fs::directory_iterator(root), fs::directory_iterator()), 1);
    EXPECT_EQ(HfFolder(path).names().size(), expected.size());
    const HfFolder averages(path / "ema");
    for (const auto& [name, tensors]: expected)
      EXPECT_TRUE(
        at::equal(averages.tensor(name).view(-1), tensors.back().to(at::kCPU, at::kBFloat16)))
        << all[i].name << ": " << name;
    expect_state(saved, expected, all[i].name + ", after saving");

    const Layout& other = all[(i + 1 + i / 2) % all.size()];
    const std::string what = all[i].name + " loaded by " + other.name;
    Trained loaded(make_mesh(other.shape, world(), device()), other.mode, at::kBFloat16, training);
    restore_state(loaded.groups, path);
    expect_state(loaded, expected, what);
    loaded.step(2);
    expect_state(loaded, next, what + ", next step");
    restore_weights(loaded.groups, path, false, whole.units);
    for (ShardGroup& group: loaded.groups) {
      for (const auto& [parameter, tensor, first, begin, count]: group.pieces())
        EXPECT_TRUE(at::equal(group.value_part.narrow(0, begin, count),
          expected.at(tensor->name)[0].narrow(0, first, count)))
          << what << ": " << tensor->name;
    }
    Trained single(alone(), ShardMode::keep, at::kBFloat16, training);
    restore_state(single.groups, path);
    expect_state(single, expected, all[i].name + " loaded by one process");
  }
}

// One process saved it: the file that users have.
TEST(Sharding, LoadsWhatOneProcessSaved) {
  const SharedFolder folder;
  Trained one(alone(), ShardMode::keep, at::kFloat);
  one.step(1);
  if (world().rank() == 0) save(one, folder.path, 1);
  world().all().barrier();
  for (const Layout& layout: layouts()) {
    Trained many(make_mesh(layout.shape, world(), device()), layout.mode, at::kFloat);
    restore_state(many.groups, folder.path / "step-00000001");
    expect_state(many, state_of(one), layout.name);
  }
}

TEST(Sharding, AFailingRankFailsTheSaveAndLeavesTheOlderOne) {
  if (world().size() == 1) GTEST_SKIP();
  const SharedFolder folder;
  Trained many(make_mesh({}, world(), device()), ShardMode::keep, at::kFloat);
  save(many, folder.path, 1);
  CheckpointContent content;
  content.step = 2;
  collect_state(many.groups, content);
  if (world().rank() == 1) content.optimizer.front().second = Tensor();
  std::string message;
  CheckpointWriter writer;
  writer.start(folder.path, std::move(content), 1, many.mesh.world);
  try {
    writer.finish();
  } catch (const Error& error) { message = error.what(); }
  if (world().rank() <= 1) {
    EXPECT_NE(message.find("cannot save checkpoint"), std::string::npos) << message;
    EXPECT_NE(message.find("is not on the CPU"), std::string::npos) << message;
  }
  if (world().rank() == 0) { EXPECT_NE(message.find("rank 1"), std::string::npos) << message; }
  many.mesh.world.barrier();
  EXPECT_EQ(newest_checkpoint(folder.path), folder.path / "step-00000001");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), fs::directory_iterator()), 1);
}

} // namespace
} // namespace pith::test
