#include "models/common.h"
#include <nlohmann/json.hpp>
#include "operators/grouped_linear.h"
#include "operators/linear.h"
#include "operators/swiglu.h"

namespace pith {
using nlohmann::json;

bool Fields::has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
const json& Fields::operator[](const char* key) const { return object_[key]; }

int64_t Fields::count(const char* key, int64_t smallest, int64_t largest) {
  if (!has(key)) return problem(key, "is missing"), smallest;
  if (!object_[key].is_number_integer()) return problem(key, "must be an integer"), smallest;
  const auto value = object_[key].get<int64_t>(); // negative where it is too large for the type
  if (value >= smallest && value <= largest) return value;
  problem(key, fmt::format("must lie in [{}, {}]", smallest, largest));
  return smallest;
}

double Fields::number(const char* key, double fallback) {
  if (!has(key)) return fallback;
  if (!object_[key].is_number()) return problem(key, "must be a number"), fallback;
  const auto value = object_[key].get<double>();
  if (!(value > 0)) problem(key, "must be positive");
  return value;
}

bool Fields::flag(const char* key, bool fallback) {
  if (!has(key)) return fallback;
  if (!object_[key].is_boolean()) return problem(key, "must be true or false"), fallback;
  return object_[key].get<bool>();
}

void Fields::only(const char* key, const json& value) {
  if (has(key) && object_[key] != value)
    problem(key, fmt::format("{} is not supported, only {}", object_[key].dump(), value.dump()));
}

RopeFields read_rope(Fields& fields, ModelConfig& config, bool yarn) {
  RopeFields rope;
  config.rope_theta = fields.number("rope_theta", 10000.0);
  rope.partial = fields.number("partial_rotary_factor", rope.partial);
  for (const char* key: {"rope_scaling", "rope_parameters"}) {
    if (!fields.has(key)) continue;
    if (!fields[key].is_object()) {
      fields.problem(key, "must be an object");
      continue;
    }
    Fields inner(fields[key], string(key) + ".");
    config.rope_theta = inner.number("rope_theta", config.rope_theta);
    rope.partial = inner.number("partial_rotary_factor", rope.partial);
    bool stretched = false;
    for (const char* kind: {"rope_type", "type"}) {
      if (!inner.has(kind) || inner[kind] == "default") continue;
      stretched = yarn && inner[kind] == "yarn";
      if (!stretched) inner.problem(kind, inner[kind].dump() + " is not supported");
    }
    if (stretched) {
      const double factor = inner.number("factor", 0);
      if (!inner.has("factor")) inner.problem("factor", "is missing");
      const auto original = inner.count("original_max_position_embeddings");
      config.yarn = {.factor = factor,
        .original_positions = real(original),
        .beta_fast = inner.number("beta_fast", 32),
        .beta_slow = inner.number("beta_slow", 1),
        .truncate = inner.flag("truncate", true)};
      const bool all_dim = inner.has("mscale_all_dim") && inner["mscale_all_dim"] != 0;
      const double all = all_dim ? yarn_mscale(factor, inner.number("mscale_all_dim", 1)) : 1;
      const double mscale = yarn_mscale(factor, inner.number("mscale", 1));
      config.yarn.magnitude = inner.number("attention_factor", mscale / all);
      rope.softmax_factor = all * all;
    }
    fields.add_problems(inner);
  }
  return rope;
}

vector<bool> layers_of_type(
  Fields& fields, int64_t num_layers, const char* type, int64_t interval) {
  const bool stated = fields.has("layer_types");
  const json types = stated ? fields["layer_types"] : json::array();
  vector<bool> chosen(index(num_layers));
  if (stated && (!types.is_array() || types.size() < chosen.size()))
    return fields.problem("layer_types", "must list every layer"), chosen;
  for (size_t i = 0; i < chosen.size(); ++i) {
    chosen[i] = stated ? types[i] == type : (int64_t(i) + 1) % interval != 0;
    if (stated && !chosen[i] && types[i] != "full_attention")
      fields.problem("layer_types", fmt::format("holds {}", types[i].dump()));
  }
  return chosen;
}

shared_ptr<const json> read_config(const fs::path& path) {
  const auto file = fs::is_directory(path) ? path / "config.json" : path;
  ifstream stream(file);
  PITH_CHECK(stream, "cannot read the model configuration {}", file);
  auto object = make_shared<const json>(json::parse(stream, nullptr, false));
  PITH_CHECK(!object->is_discarded(), "{} is not valid JSON", file);
  return object;
}

string text_of(const json& object) { return object.dump(); }

static Tensor table_of(const json& object, const char* key, ScalarType dtype) {
  const auto all = object.get<map<string, vector<vector<double>>>>();
  if (!all.contains(key)) return {};
  vector<Tensor> rows;
  for (const auto& row: all.at(key)) {
    if (row.size() != all.at(key)[0].size()) throw std::invalid_argument("rows differ in length");
    rows.push_back(at::tensor(row, kDouble));
  }
  return rows.empty() ? Tensor() : at::stack(rows).to(dtype);
}

void read_common(Fields& fields, ModelConfig& config, const char* family, const char* num_experts,
  const char* width) {
  fields.only("model_type", family);
  if (!fields.has("model_type")) fields.problem("model_type", "is missing");
  config.vocab_size = fields.count("vocab_size");
  config.hidden_size = fields.count("hidden_size");
  config.num_layers = fields.count("num_hidden_layers", 1, 1 << 16);
  config.num_heads = fields.count("num_attention_heads");
  config.num_experts = fields.count(num_experts, 1, 1 << 14);
  config.experts_per_token = fields.count("num_experts_per_tok");
  if (config.experts_per_token > config.num_experts)
    fields.problem("num_experts_per_tok", "must not be larger than the number of experts");
  config.moe_intermediate_size = fields.count(width);
  config.tie_embeddings = fields.flag("tie_word_embeddings", false);
  config.rms_norm_eps = fields.number("rms_norm_eps", 1e-6);
  fields.only("hidden_act", "silu");
  fields.only("attention_dropout", 0);
  if (fields.has("router_state")) try {
      config.router_state = {table_of(fields["router_state"], "bias", kFloat),
        table_of(fields["router_state"], "shares", kDouble)};
    } catch (const exception& error) {
      fields.problem("router_state", fmt::format("is no object of tables: {}", error));
    }
}

void read_heads(Fields& fields, ModelConfig& config, int64_t num_kv_heads, int64_t head_dim) {
  config.num_kv_heads = fields.count_or("num_key_value_heads", num_kv_heads);
  config.rotary_dim = config.head_dim = fields.count_or("head_dim", head_dim);
  if (config.num_heads % config.num_kv_heads != 0)
    fields.problem("num_key_value_heads", "must divide num_attention_heads");
  if (config.head_dim % 2 != 0) fields.problem("head_dim", "must be even (rotary embedding)");
}

string with_router_state(const string& config_json, const RouterState& state) {
  json object = json::parse(config_json);
  for (const auto& [name, table]: {pair("bias", state.bias), {"shares", state.shares}}) {
    if (!table.defined()) continue;
    json& part = object.contains("text_config") ? object["text_config"] : object;
    json& rows = part["router_state"][name] = json::array();
    const Tensor wide = table.to(kCPU, kDouble);
    for (int64_t layer = 0; layer < wide.size(0); ++layer) {
      const double* row = wide[layer].const_data_ptr<double>();
      rows.push_back(vector<double>(row, row + wide.size(1)));
    }
  }
  return object.dump(2) + "\n";
}

void ModelConfig::cut_layers(int64_t layers) {
  PITH_CHECK(layers >= 1 && layers <= num_layers, "cannot cut a model of {} layers to {}",
    num_layers, layers);
  num_layers = layers;
  for (Tensor* table: {&router_state.bias, &router_state.shares})
    if (table->defined()) *table = table->slice(0, 0, layers);
}

string ModelConfig::generation_json() const {
  const json whole = json::parse(source_json), object = whole.value("text_config", whole);
  json generation = json::object();
  for (const char* key: {"bos_token_id", "eos_token_id", "pad_token_id"})
    if (object.contains(key) && !object[key].is_null()) generation[key] = object[key];
  return generation.dump(2) + "\n";
}

json config_for_export(
  const string& source_json, const char* architecture, int64_t num_layers, ScalarType dtype) {
  json object = json::parse(source_json);
  object["architectures"] = {architecture};
  object["num_hidden_layers"] = num_layers;
  object.erase("router_state"); // of the weights that were read: with_router_state()
  object.erase("torch_dtype"); // older name of dtype
  object["dtype"] = dtype_name(dtype);
  if (object.contains("layer_types") && object["layer_types"].is_array()) {
    json& types = object["layer_types"];
    types.erase(types.begin() + num_layers, types.end());
  }
  return object;
}

vector<Parameter*> existing(initializer_list<Parameter*> parameters) {
  vector<Parameter*> all(parameters);
  std::erase_if(all, [](const Parameter* parameter) { return parameter->shape.empty(); });
  return all;
}

Parameter norm_weight(const string& name, int64_t size, bool zero_centred) {
  return Parameter(name, {size}, ParameterGroup::norm, zero_centred ? Init::zeros : Init::ones);
}

Parameter matrix(const string& name, int64_t out, int64_t in, Init init) {
  return Parameter(name, {out, in}, ParameterGroup::matrix, init);
}

Parameter qkv_weight(const string& prefix, int64_t q_size, int64_t kv_size, int64_t hidden) {
  return Parameter(prefix + "qkv_proj.weight", {q_size + 2 * kv_size, hidden},
    {{prefix + "q_proj.weight", {q_size, hidden}, 0},
      {prefix + "k_proj.weight", {kv_size, hidden}, q_size * hidden},
      {prefix + "v_proj.weight", {kv_size, hidden}, (q_size + kv_size) * hidden}},
    ParameterGroup::matrix, Init::normal);
}

SwigluMlp::SwigluMlp(const string& prefix, int64_t width, int64_t hidden)
    : gate_up(prefix + "gate_up_proj.weight", {2 * width, hidden},
        {{prefix + "gate_proj.weight", {width, hidden}, 0},
          {prefix + "up_proj.weight", {width, hidden}, width * hidden}},
        ParameterGroup::matrix, Init::normal),
      down(matrix(prefix + "down_proj.weight", hidden, width, Init::output_normal)) {}

Tensor SwigluMlp::operator()(const Tensor& rows) {
  if (gate_up.shape.empty()) return {};
  return linear(swiglu(linear(rows, gate_up)), down);
}

SwigluExperts::SwigluExperts(
  const string& prefix, const ModelConfig& config, const ModelPart& part) {
  const int64_t width = config.moe_intermediate_size, hidden = config.hidden_size;
  const int64_t numel = width * hidden, held = part.expert_end - part.expert_begin;
  vector<HfTensor> gates_ups, downs;
  for (int64_t e = 0; e < held; ++e) {
    const string expert = fmt::format("{}experts.{}.", prefix, part.expert_begin + e);
    gates_ups.push_back({expert + "gate_proj.weight", {width, hidden}, 2 * numel * e});
    gates_ups.push_back({expert + "up_proj.weight", {width, hidden}, 2 * numel * e + numel});
    downs.push_back({expert + "down_proj.weight", {hidden, width}, numel * e});
  }
  router = Parameter(
    prefix + "gate.weight", {config.num_experts, hidden}, ParameterGroup::router, Init::normal);
  gate_up = Parameter(prefix + "experts.gate_up_proj", {held, 2 * width, hidden},
    std::move(gates_ups), ParameterGroup::expert, Init::normal);
  down = Parameter(prefix + "experts.down_proj", {held, hidden, width}, std::move(downs),
    ParameterGroup::expert, Init::output_normal);
}

Tensor SwigluExperts::operator()(
  const LayerContext&, const Tensor& rows, const Tensor& row_weight, const ExpertPlan& plan) {
  const Tensor slots = permuted_swiglu(rows, gate_up, plan);
  return unpermute(grouped_linear(slots, down, plan), row_weight, plan);
}

void choose_routes(
  const LayerContext& context, const Tensor& logits, const RouteChoice& choice, Attended& out) {
  const auto layer = index(context.layer);
  RoutingTape* tape = context.tape;
  Tensor forced;
  if (tape != nullptr && tape->replay) forced = tape->topk_idx.at(layer);
  else if (context.router.force_balance)
    forced = balanced_routes(logits.size(0), choice.k, choice.num_experts, logits.device());
  else if (const Tensor& bias = context.router.state.bias;
    bias.defined() || choice.topk_groups < choice.groups) {
    const Tensor scores =
      bias.defined() ? logits.detach().softmax(1) + bias[context.layer] : logits;
    forced = group_limited_topk(scores, choice.k, choice.groups, choice.topk_groups);
  }
  const Routing routing = route(logits, choice.k, choice.normalize, forced);
  out.topk_idx = routing.topk_idx;
  out.topk_weight = choice.scale == 1 ? routing.topk_weight : routing.topk_weight * choice.scale;
  if (tape != nullptr && !tape->replay) {
    tape->topk_idx.at(layer) = out.topk_idx;
    tape->topk_weight.at(layer) = out.topk_weight.detach();
  }
  if (!context.batch.row_id.defined()) return;
  const Tensor& shares = context.router.state.shares;
  out.balance = start_balance_loss(routing.probabilities, routing.topk_idx, context.batch.row_id,
    context.batch.num_rows, context.mesh.context, context.router.kind,
    shares.defined() ? shares[context.layer] : Tensor());
  if (context.router.z_loss > 0)
    out.z_sum = logits.logsumexp(1).square().masked_fill(context.batch.row_id.lt(0), 0).sum();
}
}
