#include "models/qwen3_moe.h"
#include <nlohmann/json.hpp>
#include "operators/linear.h"

namespace pith {
namespace {
using nlohmann::json;

vector<bool> read_sparse_layers(Fields& fields, int64_t num_layers) {
  const int64_t step = fields.has("decoder_sparse_step") ? fields.count("decoder_sparse_step") : 1;
  vector<bool> sparse(index(num_layers));
  for (size_t i = 0; i < sparse.size(); ++i) sparse[i] = (int64_t(i) + 1) % step == 0;
  if (!fields.has("mlp_only_layers")) return sparse;
  const json& dense = fields["mlp_only_layers"];
  if (!dense.is_array())
    return fields.problem("mlp_only_layers", "must be a list of integers"), sparse;
  for (const json& layer: dense) {
    const bool valid = layer.is_number_integer() && layer >= 0;
    if (!valid) fields.problem("mlp_only_layers", fmt::format("holds {}", layer.dump()));
    if (valid && layer < sparse.size()) sparse[layer.get<size_t>()] = false;
  }
  return sparse;
}
}

void Qwen3MoeConfig::read(Fields& fields) {
  read_common(
    fields, *this, kName, fields.has("num_local_experts") ? "num_local_experts" : "num_experts");
  read_heads(fields, *this, num_heads, hidden_size / num_heads);
  read_rope(fields, *this, /*yarn=*/false);
  max_positions = fields.count_or("max_position_embeddings", 32768);
  sparse = read_sparse_layers(fields, num_layers);
  const bool dense = ranges::find(sparse, false) != sparse.end();
  intermediate_size =
    dense || fields.has("intermediate_size") ? fields.count("intermediate_size") : 1;
  norm_topk_prob = fields.flag("norm_topk_prob", false);
  fields.only("attention_bias", false);
  fields.only("use_sliding_window", false);
}

string Qwen3MoeConfig::to_json(ScalarType dtype) const {
  json object = config_for_export(source_json, "Qwen3MoeForCausalLM", num_layers, dtype);
  vector<int64_t> dense;
  if (object.contains("mlp_only_layers") && object["mlp_only_layers"].is_array()) {
    for (const json& layer: object["mlp_only_layers"])
      if (layer < num_layers) dense.push_back(layer.get<int64_t>());
    object["mlp_only_layers"] = dense;
  }
  return object.dump(2) + "\n";
}

ModelSize Qwen3MoeConfig::size(int64_t sequence_length) const {
  const int64_t h = hidden_size, q = num_heads * head_dim, kv = num_kv_heads * head_dim;
  int64_t activations = 0;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const bool is_sparse = sparse[index(layer)];
    // hidden, norm output, residual, rows, experts' sum, output; q and k before and after norm, v,
    // attention output; of each slot: gate and up, activation, result.
    const int64_t slots = is_sparse ? experts_per_token : 1;
    const int64_t width = is_sparse ? moe_intermediate_size : intermediate_size;
    activations += 6 * h + 3 * q + 3 * kv + slots * (h + 3 * width);
  }
  // 2 x 2 x (length / 2) x heads x head_dim forward, three times that with the backward.
  const double attention = 6.0 * real(sequence_length * q * num_layers);
  return size_of<Qwen3MoeModel>(*this, attention, activations);
}

Qwen3MoeLayer::Qwen3MoeLayer(const Qwen3MoeConfig& config, int64_t layer, const ModelPart& part)
    : config_(config), sparse_(config.sparse.at(index(layer))) {
  const string prefix = fmt::format("{}layers.{}.", config.prefix, layer);
  const string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  const int64_t h = config.hidden_size, q = config.num_heads * config.head_dim;
  input_norm_ = norm_weight(prefix + "input_layernorm.weight", h);
  qkv_ = qkv_weight(attention, q, config.num_kv_heads * config.head_dim, h);
  q_norm_ = norm_weight(attention + "q_norm.weight", config.head_dim);
  k_norm_ = norm_weight(attention + "k_norm.weight", config.head_dim);
  o_ = matrix(attention + "o_proj.weight", h, q, Init::output_normal);
  post_norm_ = norm_weight(prefix + "post_attention_layernorm.weight", h);
  if (sparse_) experts = SwigluExperts(mlp, config, part);
  else mlp_ = SwigluMlp(mlp, config.intermediate_size, h);
}

vector<Parameter*> Qwen3MoeLayer::parameters() {
  return existing({&input_norm_, &qkv_, &q_norm_, &k_norm_, &o_, &post_norm_, &experts.router,
    &experts.gate_up, &experts.down, &mlp_.gate_up, &mlp_.down});
}

Attended Qwen3MoeLayer::attend(const LayerContext& context, const Tensor& hidden) {
  const int64_t tokens = hidden.size(0), d = config_.head_dim;
  const int64_t q_size = config_.num_heads * d, kv_size = config_.num_kv_heads * d;
  const Tensor qkv =
    linear(rms_norm(hidden, input_norm_, config_.rms_norm_eps), qkv_); // (T, (Hq+2Hkv)D)
  const vector<Tensor> parts = at::split_with_sizes(qkv, {q_size, kv_size, kv_size}, 1);
  Tensor q = parts[0].view({tokens, config_.num_heads, d}); // (T, Hq, D)
  Tensor k = parts[1].view({tokens, config_.num_kv_heads, d}); // (T, Hkv, D)
  Tensor v = parts[2].view({tokens, config_.num_kv_heads, d});
  q = rotary(rms_norm(q, q_norm_, config_.rms_norm_eps), context.batch.positions, context.rotary);
  k = rotary(rms_norm(k, k_norm_, config_.rms_norm_eps), context.batch.positions, context.rotary);
  const Tensor mixed = attend_documents(context, q, k, v, 1 / sqrt(real(d))); // (T, Hq, D)

  Attended out;
  out.residual = hidden + linear(mixed.reshape({tokens, q_size}), o_);
  out.rows = rms_norm(out.residual, post_norm_, config_.rms_norm_eps);
  if (!sparse_) return out;

  choose_routes(context, linear_fp32(out.rows, experts.router),
    {config_.experts_per_token, config_.num_experts, config_.norm_topk_prob}, out);
  return out;
}
}
