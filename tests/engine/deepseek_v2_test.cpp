// DeepSeek-V2: sizes of the released models, what a configuration may say, decoding with a cache.
#include "models/deepseek_v2.h"
#include <gmock/gmock.h>
#include "engine/hf_folder.h"
#include "tests/engine/decoding.h"
#include "tests/operators/error_text.h"

namespace pith {
namespace {
using nlohmann::json;
using test::error_text;
using testing::HasSubstr;

json lite() {
  return read_json(std::string(PITH_SOURCE_DIR) + "/examples/deepseek_v2_lite/config.json");
}

// The facts of the released configuration of DeepSeek-V2.
json large() {
  json config = lite();
  config.update({{"hidden_size", 5120}, {"intermediate_size", 12288}, {"num_hidden_layers", 60},
    {"moe_intermediate_size", 1536}, {"n_routed_experts", 160}, {"n_group", 8}, {"topk_group", 3},
    {"topk_method", "group_limited_greedy"}, {"routed_scaling_factor", 16.0},
    {"num_attention_heads", 128}, {"num_key_value_heads", 128}, {"q_lora_rank", 1536}});
  return config;
}

TEST(DeepseekV2, CountsTheReleasedModels) {
  const ModelSize small = DeepseekV2Config::parse(lite(), "lite").size(4096);
  EXPECT_EQ(small.parameters, 15706484224);
  EXPECT_NEAR(static_cast<double>(small.active_parameters), 2.66e9, 0.01e9); // 2.4 + embedding
  const ModelSize big = DeepseekV2Config::parse(large(), "v2").size(4096);
  EXPECT_EQ(big.parameters, 235741434880);
  EXPECT_NEAR(static_cast<double>(big.active_parameters), 21.4e9, 0.1e9);
  auto cut = DeepseekV2Config::parse(lite(), "lite");
  cut.cut_layers(8);
  EXPECT_NEAR(cut.size(4096).flops_per_token, 5.74e9, 0.01e9);
}

TEST(DeepseekV2, CountEqualsTheTensors) {
  for (const bool latent: {false, true}) {
    json config = tiny_deepseek_config();
    if (!latent) config["q_lora_rank"] = nullptr;
    config["tie_word_embeddings"] = latent;
    TinyModelOf<DeepseekV2Model> tiny(config);
    int64_t held = 0;
    for (const Parameter* parameter: all_parameters(tiny.groups)) held += parameter->numel();
    EXPECT_EQ(held, tiny.model.config().size(64).parameters);
  }
}

// Known fault 19: the scale of the softmax and of cos and sin.
TEST(DeepseekV2, YarnHasTwoFactors) {
  const auto config = DeepseekV2Config::parse(lite(), "lite");
  EXPECT_EQ(config.yarn.magnitude, 1);
  EXPECT_NEAR(config.softmax_scale, 0.1147214, 1e-7);
  json other = lite();
  other["rope_scaling"].erase("mscale_all_dim");
  EXPECT_NEAR(DeepseekV2Config::parse(other, "x").softmax_scale, 0.0721688, 1e-7);
  EXPECT_NEAR(DeepseekV2Config::parse(other, "x").yarn.magnitude, 1.2608038, 1e-7);
  other["rope_scaling"]["attention_factor"] = 1.25;
  EXPECT_EQ(DeepseekV2Config::parse(other, "x").yarn.magnitude, 1.25);
  other["rope_scaling"] = nullptr;
  EXPECT_EQ(DeepseekV2Config::parse(other, "x").yarn.factor, 1);
  EXPECT_NEAR(DeepseekV2Config::parse(other, "x").softmax_scale, 0.0721688, 1e-7);
}

TEST(DeepseekV2, ListsEverythingThatIsWrong) {
  json config = large();
  config.erase("kv_lora_rank");
  config.update({{"norm_topk_prob", true}, {"scoring_func", "sigmoid"}, {"n_group", 7},
    {"rope_scaling", {{"type", "longrope"}, {"factor", 4}}}, {"qk_rope_head_dim", 63},
    {"first_k_dense_replace", -1}, {"num_key_value_heads", 8}, {"model_type", "deepseek_v3"}});
  const std::string text = error_text([&] { DeepseekV2Config::parse(config, "here"); });
  for (const char* part: {"here: not a usable", "kv_lora_rank is missing", "norm_topk_prob",
         "scoring_func", "n_group", "rope_scaling.type \"longrope\" is not supported",
         "qk_rope_head_dim", "first_k_dense_replace", "num_key_value_heads", "model_type"})
    EXPECT_THAT(text, HasSubstr(part));
  config = lite();
  config["rope_scaling"].erase("factor");
  config["rope_scaling"]["original_max_position_embeddings"] = "4096";
  const std::string rope = error_text([&] { DeepseekV2Config::parse(config, "here"); });
  EXPECT_THAT(rope, HasSubstr("rope_scaling.factor is missing"));
  EXPECT_THAT(rope, HasSubstr("rope_scaling.original_max_position_embeddings must be an integer"));
}

TEST(DeepseekV2, DecodingContinuesTheFullResult) {
  check_decoding<DeepseekV2Model>(tiny_deepseek_config());
}

} // namespace
} // namespace pith
