// Qwen3.5-MoE: sizes of the released models, configurations, folders, documents, decoding.
#include "models/qwen3_5_moe.h"
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include "engine/hf_folder.h"
#include "tests/engine/decoding.h"
#include "tests/engine/scratch.h"
#include "tests/operators/error_text.h"

namespace pith {
namespace {
using nlohmann::json;
using test::error_text;
using testing::HasSubstr;

json released() {
  return read_json(std::string(PITH_SOURCE_DIR) + "/examples/qwen3_5_35b_a3b/config.json");
}

TEST(Qwen35Moe, CountsTheReleasedModels) {
  const auto size = [](const json& config) {
    return Qwen35MoeConfig::parse(config, "x").size(4096);
  };
  json config = released();
  const ModelSize small = size(config);
  EXPECT_EQ(small.parameters, 34660610688); // 35B with vision and MTP
  EXPECT_NEAR(static_cast<double>(small.active_parameters), 3.45e9, 0.005e9);
  json& text = config["text_config"];
  text.erase("layer_types");
  text.update({{"hidden_size", 3072}, {"num_hidden_layers", 48}, {"num_attention_heads", 32},
    {"linear_num_value_heads", 64}, {"moe_intermediate_size", 1024},
    {"shared_expert_intermediate_size", 1024}});
  EXPECT_NEAR(static_cast<double>(size(config).parameters), 122e9, 0.5e9);
  EXPECT_NEAR(static_cast<double>(size(config).active_parameters), 10e9, 0.5e9);
  text.update({{"hidden_size", 4096}, {"num_hidden_layers", 60}, {"num_experts", 512},
    {"num_experts_per_tok", 10}});
  EXPECT_NEAR(static_cast<double>(size(config).parameters), 397e9, 1e9);
  EXPECT_NEAR(static_cast<double>(size(config).active_parameters), 17e9, 0.5e9);
}

TEST(Qwen35Moe, CountEqualsTheTensors) {
  for (const bool tied: {false, true}) {
    json config = tiny_qwen35_config();
    config["tie_word_embeddings"] = tied;
    TinyModelOf<Qwen35MoeModel> tiny(config);
    int64_t held = 0;
    for (const Parameter* parameter: all_parameters(tiny.groups)) held += parameter->numel();
    EXPECT_EQ(held, tiny.model.config().size(64).parameters);
  }
}

TEST(Qwen35Moe, ReadsTheReleasedConfiguration) {
  const auto config = Qwen35MoeConfig::parse(released(), "x");
  EXPECT_EQ(config.rotary_dim, 64);
  EXPECT_EQ(config.prefix, "model.language_model.");
  EXPECT_TRUE(config.fused_experts);
  EXPECT_EQ(config.rope_theta, 1e7);
  EXPECT_TRUE(config.delta[0]);
  EXPECT_FALSE(config.delta[39]);
  EXPECT_EQ(json::parse(config.generation_json())["eos_token_id"], 248044);
  auto cut = config;
  cut.cut_layers(5);
  const json written = json::parse(cut.to_json(at::kBFloat16));
  EXPECT_EQ(written["text_config"]["layer_types"].size(), 5u);
  EXPECT_EQ(written["text_config"]["num_hidden_layers"], 5);
  EXPECT_EQ(written["text_config"]["mtp_num_hidden_layers"], 0);
  EXPECT_FALSE(written.contains("num_hidden_layers"));
  // What is written is read as the same model, and written again without a change.
  EXPECT_EQ(
    Qwen35MoeConfig::parse(written, "x").to_json(at::kBFloat16), cut.to_json(at::kBFloat16));
  const auto text = Qwen35MoeConfig::parse(tiny_qwen35_config(), "x");
  EXPECT_EQ(text.prefix, "model.");
  EXPECT_FALSE(text.fused_experts);
}

TEST(Qwen35Moe, ListsEverythingThatIsWrong) {
  json config = released();
  json& text = config["text_config"];
  text.erase("shared_expert_intermediate_size");
  text["layer_types"][3] = "sliding_attention";
  text["rope_parameters"]["partial_rotary_factor"] = 0.001;
  text.update({{"attention_bias", true}, {"linear_num_key_heads", 5}, {"attn_output_gate", false}});
  const std::string error = error_text([&] { Qwen35MoeConfig::parse(config, "here"); });
  for (const char* part:
    {"here: not a usable", "shared_expert_intermediate_size is missing", "layer_types holds",
      "partial_rotary_factor", "attention_bias", "linear_num_key_heads", "attn_output_gate"})
    EXPECT_THAT(error, HasSubstr(part));
}

// Decay looks at the groups; zero-centred norms start at 0, the gated one at 1.
TEST(Qwen35Moe, StartsAsDocumented) {
  TinyModelOf<Qwen35MoeModel> tiny(tiny_qwen35_config());
  for (const Parameter* parameter: all_parameters(tiny.groups)) {
    const Tensor value = parameter->value.detach();
    const std::string& name = parameter->name;
    const bool decays = parameter->group == ParameterGroup::matrix ||
      parameter->group == ParameterGroup::expert || parameter->group == ParameterGroup::embedding;
    EXPECT_EQ(
      decays, value.dim() > 1 && !name.ends_with("gate.weight") && !name.ends_with("1d.weight"))
      << name;
    if (name.ends_with("A_log")) {
      EXPECT_GE(value.min().item<float>(), std::log(0.01f));
      EXPECT_LE(value.max().item<float>(), std::log(16.0f));
      EXPECT_GT((value - value[0]).abs().max().item<float>(), 0);
    } else if (name.ends_with("linear_attn.norm.weight") || name.ends_with("dt_bias")) {
      EXPECT_TRUE(value.eq(1).all().item<bool>()) << name;
    } else if (name.ends_with("norm.weight")) {
      EXPECT_TRUE(value.eq(0).all().item<bool>()) << name;
    }
  }
}

// A folder as released: vision and MTP tensors are left out, all others must fit.
TEST(Qwen35Moe, ImportsTheTextPart) {
  const std::string golden = std::string(PITH_SOURCE_DIR) + "/tests/golden/qwen3_5_moe_a";
  const auto config = Qwen35MoeConfig::parse_file(golden);
  ASSERT_TRUE(config.fused_experts);
  const Scratch scratch;
  const HfFolder source(golden);
  std::vector<NamedTensor> tensors;
  for (const std::string& name: source.names()) tensors.emplace_back(name, source.tensor(name));
  const auto import = [&] {
    write_safetensors(scratch / "model.safetensors", tensors);
    TinyModelOf<Qwen35MoeModel> tiny(config, at::kFloat, at::kCPU, 0.02);
    restore_weights(tiny.groups, scratch.path, false);
    return first_non_finite(tiny.groups);
  };
  for (const char* name: {"model.visual.blocks.0.attn.qkv.weight",
         "model.visual.blocks.1.attn.qkv.weight", "mtp.layers.0.input_layernorm.weight"})
    tensors.emplace_back(name, at::zeros({3}));
  testing::internal::CaptureStderr();
  EXPECT_EQ(import(), "");
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_THAT(told, HasSubstr("model.visual.blocks.1.attn.qkv.weight"));
  EXPECT_THAT(told, HasSubstr("mtp.layers.0.input_layernorm.weight"));
  tensors.emplace_back("model.language_model.layers.0.mlp.extra", at::zeros({3}));
  EXPECT_THAT(
    error_text(import), HasSubstr("not in the model: model.language_model.layers.0.mlp.extra"));
}

// Packed documents are isolated in every layer: one token changed changes its document's later
// logits and none of another.
TEST(Qwen35Moe, DocumentsAreIsolated) {
  TinyModelOf<Qwen35MoeModel> tiny(tiny_qwen35_config());
  auto pipeline = tiny.pipeline();
  std::vector<Row> rows = ragged_rows(1, 80, 61);
  const auto run = [&] { return pipeline.forward_only(cut(rows, 1), AllLogits()).per_token[0]; };
  const Tensor before = run();
  const auto& begins = rows[0].document_begins;
  for (const size_t document: {size_t{0}, size_t{2}}) {
    const auto t = static_cast<size_t>(begins[document]);
    const int64_t kept = rows[0].tokens[t];
    rows[0].tokens[t] = (kept + 1) % 61;
    const Tensor change = (run() - before).abs().amax(1);
    rows[0].tokens[t] = kept;
    for (int64_t i = 0; i < 80; ++i) {
      const bool inside = i >= begins[document] && i < begins[document + 1];
      const auto largest = change[i].item<double>();
      EXPECT_TRUE(inside ? largest > 1e-5 : largest < 1e-5) << i << ": " << largest;
    }
  }
}

TEST(Qwen35Moe, DecodingContinuesTheFullResult) {
  check_decoding<Qwen35MoeModel>(tiny_qwen35_config());
}

} // namespace
} // namespace pith
