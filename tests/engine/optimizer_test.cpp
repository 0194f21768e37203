// Muon, parameter groups, BF16 moments and the moving average over a model's shard groups.
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include "core/random.h"
#include "tests/engine/scratch.h"
#include "tests/engine/tiny_model.h"

namespace pith {
namespace {
RunConfig::Training muon() {
  RunConfig::Training training;
  training.optimizer = "muon";
  return training;
}

// A tiny model whose tensors have the rules of `training`.
template <class Model = Qwen3MoeModel> struct Ruled {
  Mesh mesh = mesh_of_one(at::kCPU);
  Model model;
  std::vector<ShardGroup> groups;
  std::vector<std::string> rules;

  explicit Ruled(const RunConfig::Training& training, const nlohmann::json& json = tiny_config(),
    at::ScalarType dtype = at::kFloat)
      : Ruled(Model::Config::parse(json, "test"), training, dtype) {}
  Ruled(
    const typename Model::Config& config, const RunConfig::Training& training, at::ScalarType dtype)
      : model(config, whole_model(config.num_layers, config.num_experts)) {
    const Units units = model.parameter_units();
    rules = set_update_rules(units, units, training);
    groups = make_shard_groups(
      units, dtype, mesh, ShardGroup::Use::training, ShardMode::keep, optimizer_states(training));
    for (ShardGroup& group: groups) group.initialize(7, 0.1, config.num_layers);
  }
  void step(const RunConfig::Training& training, int64_t number, double lr = 1e-2) {
    for (ShardGroup& group: groups) {
      Tensor noise = at::empty_like(group.grad_part);
      fill_normal(noise, 3, fmt::format("gradient {} {}", group.unit(), number), 1e-2);
      group.grads.zero_();
      for (const auto& piece: group.pieces()) // not the padding
        group.grad_part.narrow(0, piece.begin, piece.count)
          .copy_(noise.narrow(0, piece.begin, piece.count));
    }
    optimizer_step(groups, training, lr, number, grad_norm(groups, mesh));
  }
};

// One matrix a Hugging Face tensor and expert, gate and up apart; every element of Muon's tensors
// is in one of them, none of the others'.
template <class Model> void check_matrices(const typename Model::Config& config, size_t expected) {
  SCOPED_TRACE(fmt::format("{} matrices", expected));
  Ruled<Model> tiny(config, muon(), at::kFloat);
  size_t matrices = 0;
  for (const ShardGroup& group: tiny.groups) {
    for (const Parameter* parameter: group.parameters()) {
      Tensor seen = at::zeros_like(parameter->grad);
      for (const HfTensor& tensor: parameter->tensors) {
        const bool matrix = parameter->group == ParameterGroup::matrix ||
          (parameter->group == ParameterGroup::expert && !tensor.name.ends_with("_bias"));
        EXPECT_EQ(tensor.rule.muon, matrix) << tensor.name;
        if (!matrix) continue;
        for (Tensor& one: muon_matrices(Parameter::view_of(seen, tensor), tensor.fused)) {
          EXPECT_LE(one.size(0), one.size(1)) << tensor.name;
          if (parameter->group == ParameterGroup::expert) { // gate, up and down of one size
            EXPECT_EQ(one.sizes(), (std::vector<int64_t>{24, 32})) << tensor.name;
          }
          one.add_(1);
          ++matrices;
        }
        EXPECT_TRUE(Parameter::view_of(seen, tensor).eq(1).all().template item<bool>());
      }
    }
  }
  EXPECT_EQ(matrices, expected);
}

TEST(Muon, TakesEveryMatrixOnce) {
  // Qwen3: 4 of each attention, 3 of the dense layer, 3 of each of 6 experts in two layers.
  check_matrices<Qwen3MoeModel>(
    Qwen3MoeConfig::parse(tiny_config(), "test"), 3 * 4 + 3 + 2 * 6 * 3);
  // q_a, q_b, kv_a, kv_b, o; 3 of the dense layer; 8 experts and the shared one in two layers.
  check_matrices<DeepseekV2Model>(
    DeepseekV2Config::parse(tiny_deepseek_config(), "test"), 3 * 5 + 3 + 2 * 9 * 3);
  check_matrices<GptOssModel>(GptOssConfig::parse(tiny_gpt_oss_config(), "test"), 3 * (4 + 8 * 3));
  // qkv, z, b, a, out in two layers, 4 in the third; 8 experts and the shared one in each.
  Qwen35MoeConfig config = Qwen35MoeConfig::parse(tiny_qwen35_config(), "test");
  for (const bool fused: {true, false}) {
    config.fused_experts = fused;
    check_matrices<Qwen35MoeModel>(config, 2 * 5 + 4 + 3 * 9 * 3);
  }
}

// Several steps against matrices updated one by one in FP64: momentum, Nesterov, five iterations,
// 0.2 sqrt(larger side), decay.
TEST(Muon, FollowsThePaperOnEveryMatrix) {
  RunConfig::Training training = muon();
  training.clip_norm = 0;
  for (const bool gpt: {false, true}) {
    const auto check = [&]<class Model>(Ruled<Model> tiny) {
      std::map<std::string, std::pair<Tensor, Tensor>> expected; // weight, momentum
      const auto each = [&](const auto& use) {
        for (ShardGroup& group: tiny.groups)
          for (size_t i = 0; i < group.parameters().size(); ++i)
            for (const HfTensor& tensor: group.parameters()[i]->tensors) {
              if (!tensor.rule.muon) continue;
              const auto view = [&](const Tensor& flat) {
                return Parameter::view_of(group.slice(flat, i), tensor).to(at::kDouble);
              };
              use(tensor, view(group.master), view(group.grads));
            }
      };
      each([&](const HfTensor& tensor, const Tensor& master, const Tensor&) {
        expected[tensor.name] = {master.clone(), at::zeros_like(master)};
      });
      for (int64_t step = 1; step <= 3; ++step) {
        tiny.step(training, step);
        each([&](const HfTensor& tensor, const Tensor& master, const Tensor& grad) {
          auto& [weight, momentum] = expected.at(tensor.name);
          momentum = momentum * 0.95 + grad;
          weight = weight * (1 - 1e-2 * 0.1);
          const auto weights = muon_matrices(weight, tensor.fused);
          const auto directions = muon_matrices(momentum * 0.95 + grad, tensor.fused);
          for (size_t m = 0; m < weights.size(); ++m) {
            Tensor x = directions[m] / (directions[m].norm() + 1e-7);
            for (int k = 0; k < 5; ++k) {
              const Tensor a = x.mm(x.t());
              x = x * 3.4445 + (a * -4.7750 + a.mm(a) * 2.0315).mm(x);
            }
            Tensor w = weights[m];
            w.sub_(x * (1e-2 * 0.2 * std::sqrt(static_cast<double>(x.size(1)))));
          }
          EXPECT_LT(relative_error(master, weight), 1e-5) << tensor.name << " step " << step;
        });
      }
    };
    gpt ? check(Ruled<GptOssModel>(training, tiny_gpt_oss_config()))
        : check(Ruled<Qwen3MoeModel>(training));
  }
}

// Without gradients Muon's matrices decay as AdamW's do.
TEST(Muon, DecaysAlone) {
  RunConfig::Training training = muon();
  Ruled<> tiny(training);
  const Tensor before = tiny.groups[1].master.clone();
  zero_grads(tiny.groups);
  for (int64_t step = 1; step <= 10; ++step)
    optimizer_step(tiny.groups, training, 0.1, step, grad_norm(tiny.groups, tiny.mesh));
  const auto& segment = tiny.groups[1].segments().at(0);
  ASSERT_TRUE(segment.rule.muon);
  const auto part = [&](const Tensor& x) { return x.slice(0, segment.begin, segment.end); };
  EXPECT_LT(relative_error(part(tiny.groups[1].master), part(before) * std::pow(0.99, 10)), 1e-6);
}

TEST(Muon, HasNoSecondMoments) {
  Ruled<> adamw(RunConfig::Training{}), tiny(muon());
  const auto elements = [](const Ruled<>& model) {
    int64_t sum = 0;
    for (const ShardGroup& group: model.groups) sum += group.exp_avg_sq.numel();
    return sum;
  };
  int64_t matrices = 0;
  for (const ShardGroup& group: tiny.groups)
    for (const auto& piece: group.pieces())
      if (piece.tensor->rule.muon) matrices += piece.count;
  EXPECT_LE(elements(tiny) + matrices, elements(adamw));
  EXPECT_LT(elements(tiny), elements(adamw) / 3);
}

std::string refusal(const std::vector<TensorGroup>& groups) {
  RunConfig::Training training;
  training.groups = groups;
  return error_of([&] { Ruled<> tiny(training); });
}

TEST(Groups, TheLastMatchDecides) {
  RunConfig::Training training = muon();
  training.groups = {{"self_attn", "adamw", 0.5, 0.3}, {"q_proj", "", 2},
    {"\\.norm\\.", "", 1, 0.7}, {"layers\\.2\\..*gate\\.weight$", "muon"}};
  Ruled<> tiny(training);
  std::map<std::string, UpdateRule> rules;
  for (const Parameter* parameter: all_parameters(tiny.groups))
    for (const HfTensor& tensor: parameter->tensors) rules[tensor.name] = tensor.rule;
  const std::string layer = "model.layers.2.";
  EXPECT_EQ(rules.at(layer + "self_attn.k_proj.weight"), (UpdateRule{false, true, 0.5, 0.3}));
  EXPECT_EQ(rules.at(layer + "self_attn.q_proj.weight"), (UpdateRule{true, true, 2}));
  EXPECT_EQ(rules.at(layer + "self_attn.q_norm.weight"), (UpdateRule{false, false, 0.5, 0.3}));
  EXPECT_EQ(rules.at(layer + "mlp.gate.weight"), (UpdateRule{true, false}));
  EXPECT_EQ(rules.at("model.layers.0.mlp.gate.weight"), UpdateRule{});
  EXPECT_EQ(rules.at("model.norm.weight"), (UpdateRule{false, false, 1, 0.7}));
  EXPECT_EQ(rules.at("lm_head.weight"), (UpdateRule{false, true}));
  EXPECT_EQ(tiny.rules[0], "adamw, rate x 0.5, decay 0.3: 15 tensors, 6.19k parameters");
}

// A fused parameter of which a group names one tensor: its own rate and decay, nothing else's.
TEST(Groups, ReachOneTensorOfAFusedParameter) {
  RunConfig::Training plain, grouped;
  plain.clip_norm = grouped.clip_norm = 0;
  grouped.groups = {{"k_proj", "", 0}, {"v_proj", "", 1, 0.5}, {"experts\\.3\\.up", "muon"}};
  Ruled<> a(plain), b(grouped);
  const Tensor start = a.groups[1].master.clone();
  // Equal gradients although the layouts differ.
  const auto named = [](Ruled<>& tiny, bool grads) {
    std::map<std::string, Tensor> all;
    for (ShardGroup& group: tiny.groups)
      for (const auto& piece: group.pieces())
        all[piece.tensor->name] =
          (grads ? group.grad_part : group.master).narrow(0, piece.begin, piece.count);
    return all;
  };
  const auto before = [&] {
    std::map<std::string, Tensor> all;
    for (const auto& [name, tensor]: named(a, false)) all[name] = tensor.clone();
    return all;
  }();
  for (Ruled<>* tiny: {&a, &b}) {
    zero_grads(tiny->groups);
    for (auto& [name, grad]: named(*tiny, true)) fill_normal(grad, 5, name, 1e-2);
    optimizer_step(
      tiny->groups, tiny == &a ? plain : grouped, 1e-2, 1, grad_norm(tiny->groups, tiny->mesh));
  }
  const auto of_a = named(a, false), of_b = named(b, false);
  for (const auto& [name, tensor]: of_a) {
    const Tensor& other = of_b.at(name);
    if (name.find("k_proj") != std::string::npos) {
      EXPECT_TRUE(at::equal(other, before.at(name))) << name;
    } else if (name.find("v_proj") != std::string::npos) {
      EXPECT_LT(relative_error(other, tensor - before.at(name) * (1e-2 * 0.4)), 1e-6) << name;
    } else if (name.find("experts.3.up") != std::string::npos) {
      EXPECT_FALSE(at::equal(other, tensor)) << name;
    } else {
      EXPECT_TRUE(at::equal(other, tensor)) << name;
    }
  }
}

TEST(Groups, RefusesByName) {
  EXPECT_EQ(refusal({{"mlp"}, {"mlp.*norm"}}),
    "training.groups: no tensor of the model matches \"mlp.*norm\"; the first one is called "
    "model.embed_tokens.weight");
  EXPECT_EQ(refusal({{"^model.norm", "muon"}}),
    "training.groups: Muon takes matrices, model.norm.weight has the shape (32)");
  RunConfig::Training training;
  training.groups = {{"gate_up_proj_bias", "muon"}};
  EXPECT_ERROR(Ruled<GptOssModel>(training, tiny_gpt_oss_config()), "gate_up_proj_bias");
}

// BF16 moments: near the FP32 run's weights, half the memory.
TEST(Moments, Bf16StaysNearFp32) {
  for (const char* optimizer: {"adamw", "muon"}) {
    RunConfig::Training wide, half;
    wide.optimizer = half.optimizer = optimizer;
    half.moments = "bfloat16";
    Ruled<> a(wide), b(half);
    EXPECT_EQ(b.groups[1].exp_avg.scalar_type(), at::kBFloat16);
    EXPECT_EQ(b.groups[1].exp_avg_sq.scalar_type(), at::kBFloat16);
    std::vector<Tensor> start;
    for (const ShardGroup& group: a.groups) start.push_back(group.master.clone());
    for (int64_t step = 1; step <= 5; ++step) a.step(wide, step), b.step(half, step);
    for (size_t g = 0; g < a.groups.size(); ++g) {
      const double error =
        relative_error(b.groups[g].master - start[g], a.groups[g].master - start[g]);
      EXPECT_LT(error, 2e-2) << optimizer;
      EXPECT_GT(error, 0) << optimizer;
    }
  }
}

TEST(Ema, FollowsItsClosedForm) {
  RunConfig::Training training;
  training.ema_decay = 0.9;
  Ruled<> tiny(training, tiny_config(), at::kBFloat16);
  std::vector<Tensor> expected;
  for (const ShardGroup& group: tiny.groups) expected.push_back(group.master.to(at::kDouble));
  for (int64_t step = 1; step <= 5; ++step) {
    tiny.step(training, step);
    for (size_t g = 0; g < expected.size(); ++g) {
      expected[g] = expected[g] * 0.9 + tiny.groups[g].master.to(at::kDouble) * 0.1;
      EXPECT_LT(relative_error(tiny.groups[g].ema, expected[g]), 1e-6);
    }
  }
}

fs::path save(std::span<ShardGroup> groups, const fs::path& root) {
  CheckpointContent content;
  content.step = 2;
  content.files = {{"config.json", "{}"}, {"generation_config.json", "{}"}};
  content.training_state = "{}";
  collect_state(groups, content);
  CheckpointWriter writer;
  writer.start(root, std::move(content), 0);
  writer.finish();
  return root / "step-00000002";
}

// Momentum, BF16 moments and averages come back bit for bit, and the next step is the same.
TEST(Resume, IsExactForEveryState) {
  RunConfig::Training training = muon();
  training.moments = "bfloat16";
  training.ema_decay = 0.5;
  training.groups = {{"k_proj", "adamw", 0.5}};
  const Scratch scratch;
  Ruled<> saved(training, tiny_config(), at::kBFloat16);
  for (const int64_t step: {1, 2}) saved.step(training, step);
  const fs::path folder = save(saved.groups, scratch.path);
  EXPECT_TRUE(verify_checkpoint(folder).empty());
  Ruled<> loaded(training, tiny_config(), at::kBFloat16);
  restore_state(loaded.groups, folder);
  const auto expect_equal = [&](const char* when) {
    for (size_t g = 0; g < saved.groups.size(); ++g)
      for (const auto buffer: {&ShardGroup::values, &ShardGroup::master, &ShardGroup::exp_avg,
             &ShardGroup::exp_avg_sq, &ShardGroup::ema})
        EXPECT_TRUE(at::equal(saved.groups[g].*buffer, loaded.groups[g].*buffer)) << when;
  };
  expect_equal("restored");
  saved.step(training, 3), loaded.step(training, 3);
  expect_equal("a step later");

  // The average is a model folder of its own; the weights are not disturbed by writing it.
  restore_state(loaded.groups, folder);
  Ruled<> average(training, tiny_config(), at::kBFloat16);
  restore_weights(average.groups, folder / "ema", false);
  for (size_t g = 0; g < loaded.groups.size(); ++g) {
    EXPECT_TRUE(at::equal(average.groups[g].values, loaded.groups[g].ema.to(at::kBFloat16)));
    EXPECT_TRUE(at::equal(average.groups[g].ema, average.groups[g].master));
    EXPECT_FALSE(at::equal(average.groups[g].values, loaded.groups[g].values));
  }
  EXPECT_EQ(HfFolder(folder / "ema").names(), HfFolder(folder).names());
}

TEST(Resume, RefusesAnotherOptimizerMomentsOrAverage) {
  const Scratch scratch;
  RunConfig::Training training = muon(), other = training;
  Ruled<> saved(training);
  const fs::path folder = save(saved.groups, scratch.path);
  const auto refused = [&](const RunConfig::Training& now) {
    return error_of([&] {
      Ruled<> tiny(now);
      restore_state(tiny.groups, folder);
    });
  };
  const auto expect = [&](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  };
  expect(refused(RunConfig::Training{}), "there is no exp_avg of model.layers.0.");
  other.groups = {{"layers.1.*up_proj", "adamw"}};
  expect(refused(other), "there is no exp_avg of model.layers.1.mlp.up_proj.weight");
  other = training;
  other.moments = "bfloat16";
  expect(refused(other), "is float32, here it is bfloat16");
  other = training;
  other.ema_decay = 0.9;
  expect(refused(other), "there is no ema of model.embed_tokens.weight");
}

} // namespace
} // namespace pith
