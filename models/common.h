#pragma once
#include <nlohmann/json_fwd.hpp>
#include "models/model.h"
#include "operators/embedding.h"
#include "operators/rms_norm.h"

namespace pith {
// Reads fields of a config.json; collects what is wrong instead of stopping at the first.
class Fields {
 public:
  explicit Fields(const nlohmann::json& object, string prefix = "")
      : object_(object), prefix_(std::move(prefix)) {}

  bool has(const char* key) const; // and not null
  const nlohmann::json& operator[](const char* key) const;
  int64_t count(const char* key, int64_t smallest = 1, int64_t largest = 1 << 30);
  int64_t count_or(const char* key, int64_t fallback, int64_t smallest = 1) {
    return has(key) ? count(key, smallest) : fallback;
  }
  double number(const char* key, double fallback); // positive
  bool flag(const char* key, bool fallback);
  // A problem unless the field is absent or this: else unsupported.
  void only(const char* key, const nlohmann::json& value);

  void problem(const string& key, const string& text) {
    problems_ += fmt::format("\n  {}{} {}", prefix_, key, text);
  }
  void add_problems(const Fields& other) { problems_ += other.problems_; }
  const string& problems() const { return problems_; }
 private:
  const nlohmann::json& object_;
  string prefix_, problems_;
};

// Reads what all families say alike; keys of the experts' number and width.
void read_common(Fields& fields, ModelConfig& config, const char* family,
  const char* num_experts = "num_experts", const char* width = "moe_intermediate_size");
// Reads num_key_value_heads and head_dim; without them these.
void read_heads(Fields& fields, ModelConfig& config, int64_t num_kv_heads, int64_t head_dim);

struct RopeFields {
  double partial = 0.25; // of a head, in families that rotate a part
  double softmax_factor = 1; // the mscale of mscale_all_dim, squared
};
// rope_theta at the top level or in rope_parameters, YaRN in rope_scaling or there. Without `yarn`
// a configuration that asks for it has a problem.
RopeFields read_rope(Fields& fields, ModelConfig& config, bool yarn);

// Layers of this type by layer_types, else all but every `interval`-th; others: full attention.
vector<bool> layers_of_type(Fields& fields, int64_t num_layers, const char* type, int64_t interval);

// The object in a config.json or a folder's, and back to text.
shared_ptr<const nlohmann::json> read_config(const fs::path& path);
string text_of(const nlohmann::json& object);

// Reads config.json in any of a family's styles by Family::read(). One Error lists all missing,
// ill-typed or unsupported fields.
// NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility)
template <class Family> struct FamilyConfig : ModelConfig {
  static Family parse(const nlohmann::json& object, const string& source) {
    Family config;
    Fields fields(object);
    config.read(fields);
    PITH_CHECK(fields.problems().empty(), "{}: not a usable {} configuration:{}", source,
      Family::kName, fields.problems());
    config.source_json = text_of(object);
    return config;
  }
  static Family parse_file(const fs::path& path) {
    return parse(*read_config(path), path.string());
  }
};

// The config.json that was read, with these changes.
nlohmann::json config_for_export(
  const string& source_json, const char* architecture, int64_t num_layers, ScalarType dtype);
// The same with the state of its router's balancing, as read_common() reads it.
string with_router_state(const string& config_json, const RouterState& state);

Parameter norm_weight(const string& name, int64_t size, bool zero_centred = false);

template <class ItsConfig, class ItsLayer> class Decoder {
 public:
  using Config = ItsConfig;
  using Layer = ItsLayer;

  Decoder(Config config, const ModelPart& part) : config_(std::move(config)), part_(part) {
    const int64_t h = config_.hidden_size;
    const bool tied = config_.tie_embeddings;
    const auto table = [&](const string& name) {
      return Parameter(name, {config_.vocab_size, h}, ParameterGroup::embedding, Init::normal);
    };
    if (part.embedding || (part.head && tied))
      embedding_ = table(config_.prefix + "embed_tokens.weight");
    if (part.head) norm_ = norm_weight(config_.prefix + "norm.weight", h, config_.zero_centred);
    if (part.head && !tied) head_ = table("lm_head.weight");
    for (const int64_t index: part.layers) layers_.emplace_back(config_, index, part);
  }
  const Config& config() const { return config_; }
  Tensor embed(const Tensor& tokens) { return embedding(tokens, embedding_); }
  Layer& layer(int64_t index) { return layers_[part_.place_of(index)]; }
  Tensor final_norm(const Tensor& hidden) {
    return rms_norm(hidden, norm_, config_.rms_norm_eps, config_.zero_centred);
  }
  Parameter& head_weight() { return head_.shape.empty() ? embedding_ : head_; } // or tied
  RotaryTable rotary(int64_t num_positions, Device device) const {
    return make_rotary_table(
      num_positions, config_.rotary_dim, config_.rope_theta, device, config_.yarn);
  }
  vector<vector<Parameter*>> parameter_units() {
    vector<vector<Parameter*>> units;
    if (!embedding_.shape.empty()) units.push_back({&embedding_});
    for (Layer& layer: layers_) units.push_back(layer.parameters());
    if (!norm_.shape.empty()) units.push_back({&norm_});
    if (!head_.shape.empty()) units.back().push_back(&head_);
    return units;
  }
 private:
  Config config_;
  ModelPart part_;
  Parameter embedding_, norm_, head_; // (V, H), (H), (V, H), as the part holds them
  deque<Layer> layers_; // a deque: operators keep addresses of parameters
};

// mixing: floating-point operations of a token's attention, forward and backward.
template <class Model>
ModelSize size_of(const typename Model::Config& config, double mixing, int64_t activations) {
  Model model(config, whole_model(config.num_layers, config.num_experts));
  ModelSize size{.activations_per_token = activations};
  int64_t matrices = config.tie_embeddings ? 0 : -config.vocab_size * config.hidden_size;
  for (const auto& unit: model.parameter_units()) {
    for (const Parameter* p: unit) {
      const bool expert = p->group == ParameterGroup::expert;
      const int64_t passed =
        expert ? p->numel() / config.num_experts * config.experts_per_token : p->numel();
      size.parameters += p->numel();
      size.active_parameters += passed;
      if (p->shape.size() > (expert ? 2 : 1)) matrices += passed;
    }
  }
  size.flops_per_token = 6.0 * real(matrices) + mixing;
  return size;
}

vector<Parameter*> existing(initializer_list<Parameter*> parameters);

Parameter matrix(const string& name, int64_t out, int64_t in, Init init = Init::normal);
// One parameter (q_size + 2 kv_size, hidden).
Parameter qkv_weight(const string& prefix, int64_t q_size, int64_t kv_size, int64_t hidden);

// A dense MLP or shared experts; without parameters: undefined.
struct SwigluMlp {
  Parameter gate_up, down; // (2 width, hidden): gate rows, then up rows; (hidden, width)

  SwigluMlp() = default;
  SwigluMlp(const string& prefix, int64_t width, int64_t hidden);
  Tensor operator()(const Tensor& rows); // (T, H) -> (T, H)
};

// Stage 3 with SwiGLU; on disk each expert's gate, up and down.
struct SwigluExperts {
  Parameter router, gate_up, down; // (E, H); of a part (e, 2 I, H), (e, H, I)

  SwigluExperts() = default;
  SwigluExperts(const string& prefix, const ModelConfig& config, const ModelPart& part);
  Tensor operator()(
    const LayerContext&, const Tensor& rows, const Tensor& row_weight, const ExpertPlan& plan);
};

struct RouteChoice {
  int64_t k, num_experts;
  bool normalize; // norm_topk_prob
  int64_t groups = 1, topk_groups = 1; // fewer: group_limited_topk()
  double scale = 1; // of the weights
};
// Routes (or the context's: replayed, balanced), weights, balance loss of logits (T, E).
void choose_routes(
  const LayerContext& context, const Tensor& logits, const RouteChoice& choice, Attended& out);
}
