// What model families share: fields of a config.json, parameters in Hugging Face's layouts, and the
// step from router logits to routes.
#pragma once
#include <nlohmann/json.hpp>

#include "models/model.h"

namespace pith {

// Reads typed fields of a config.json and collects what is wrong instead of stopping at the first.
class Fields {
 public:
  explicit Fields(const nlohmann::json& object, std::string prefix = "")
      : object_(object), prefix_(std::move(prefix)) {}

  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  const nlohmann::json& operator[](const char* key) const { return object_[key]; }

  int64_t count(const char* key, int64_t smallest = 1);
  int64_t count_or(const char* key, int64_t fallback, int64_t smallest = 1) {
    return has(key) ? count(key, smallest) : fallback;
  }
  double number(const char* key, double fallback);  // positive
  bool flag(const char* key, bool fallback);
  // A problem unless the field is absent or has this value: what is not supported otherwise.
  void only(const char* key, const nlohmann::json& value);

  void problem(const std::string& key, const std::string& text) {
    problems_ += fmt::format("\n  {}{} {}", prefix_, key, text);
  }
  void add_problems(const Fields& other) { problems_ += other.problems_; }
  const std::string& problems() const { return problems_; }

 private:
  const nlohmann::json& object_;
  std::string prefix_, problems_;
};

// rope_theta at the top level or inside rope_parameters, and YaRN in rope_scaling or there.
struct RopeFields {
  double theta;
  Yarn yarn;
  double softmax_factor = 1;  // of the softmax scale: the mscale of mscale_all_dim, squared
};
// Without `yarn`, a configuration that asks for it has a problem.
RopeFields read_rope(Fields& fields, bool yarn);

// The object in a config.json or in the one of a folder.
nlohmann::json read_config(const std::filesystem::path& path);
// Checks and reads what every family has; config: a family's Config.
template <class Config>
void read_common(Fields& fields, Config& config, const char* family) {
  fields.only("model_type", family);
  if (!fields.has("model_type")) fields.problem("model_type", "is missing");
  config.vocab_size = fields.count("vocab_size");
  config.hidden_size = fields.count("hidden_size");
  config.num_layers = fields.count("num_hidden_layers");
  config.num_heads = fields.count("num_attention_heads");
  config.experts_per_token = fields.count("num_experts_per_tok");
  config.moe_intermediate_size = fields.count("moe_intermediate_size");
  config.tie_embeddings = fields.flag("tie_word_embeddings", false);
  config.rms_norm_eps = fields.number("rms_norm_eps", 1e-6);
  fields.only("attention_bias", false);
  fields.only("hidden_act", "silu");
  fields.only("attention_dropout", 0);
}
// config.json of a checkpoint: the one that was read, with these changes.
nlohmann::json config_for_export(const std::string& source_json, const char* architecture,
    int64_t num_layers, at::ScalarType dtype);
// generation_config.json with the special tokens of a config.json.
std::string special_tokens_json(const std::string& source_json);

std::string layer_prefix(int64_t index);
Parameter norm_weight(const std::string& name, int64_t size);
// Gate and up projections as one parameter (2 width, hidden): gate rows, then up rows.
Parameter gate_up_weight(const std::string& prefix, int64_t width, int64_t hidden);
// (experts, 2 width, hidden) and (experts, hidden, width) of experts [begin, end), one Hugging Face
// tensor for each expert's gate, up and down.
Parameter expert_gate_up_weight(
    const std::string& prefix, int64_t width, int64_t hidden, int64_t begin, int64_t end);
Parameter expert_down_weight(
    const std::string& prefix, int64_t width, int64_t hidden, int64_t begin, int64_t end);

struct RouteChoice {
  int64_t k, num_experts;
  bool normalize;                       // norm_topk_prob
  int64_t groups = 1, topk_groups = 1;  // group_limited_topk() where some are left out
  double scale = 1;                     // of the weights
};
// Routes, weights and balance loss of logits (T, E) float32 into `out`; routes are taken from the
// tape, or balanced, where the context says so.
void choose_routes(
    const LayerContext& context, const Tensor& logits, const RouteChoice& choice, Attended& out);

}  // namespace pith
