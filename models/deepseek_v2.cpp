#include "models/deepseek_v2.h"
#include <nlohmann/json.hpp>
#include "operators/linear.h"

namespace pith {
constexpr double kLatentEps = 1e-6; // of the latents' norms, despite rms_norm_eps

void DeepseekV2Config::read(Fields& fields) {
  read_common(fields, *this, kName, "n_routed_experts");
  max_positions = fields.count_or("max_position_embeddings", 2048);
  q_rank = fields.count_or("q_lora_rank", 0);
  kv_rank = fields.count("kv_lora_rank");
  plain_dim = fields.count("qk_nope_head_dim");
  rotary_dim = fields.count("qk_rope_head_dim");
  v_dim = fields.count("v_head_dim");
  shared_experts = fields.count_or("n_shared_experts", 0, 0);
  dense_layers = fields.count_or("first_k_dense_replace", 0, 0);
  intermediate_size = fields.count_or("intermediate_size", 1);
  routed_scale = fields.number("routed_scaling_factor", 1);
  softmax_scale = read_rope(fields, *this, /*yarn=*/true).softmax_factor / sqrt(real(qk_dim()));
  groups = topk_groups = 1;
  if (fields.has("topk_method") && fields["topk_method"] == "group_limited_greedy") {
    groups = fields.count("n_group");
    topk_groups = fields.count("topk_group");
    if (num_experts % groups != 0 || topk_groups > groups)
      fields.problem("n_group", "must divide n_routed_experts and be topk_group or more");
    if (experts_per_token > num_experts / groups * topk_groups)
      fields.problem("topk_group", "groups have fewer experts than num_experts_per_tok");
  } else {
    fields.only("topk_method", "greedy");
  }
  if (rotary_dim % 2 != 0) fields.problem("qk_rope_head_dim", "must be even");
  if (dense_layers > 0 && !fields.has("intermediate_size"))
    fields.problem("intermediate_size", "is missing");
  fields.only("num_key_value_heads", num_heads);
  fields.only("moe_layer_freq", 1);
  fields.only("scoring_func", "softmax");
  fields.only("norm_topk_prob", false);
  fields.only("attention_bias", false);
  fields.only("mlp_bias", false);
}

string DeepseekV2Config::to_json(ScalarType dtype) const {
  return config_for_export(source_json, "DeepseekV2ForCausalLM", num_layers, dtype).dump(2) + "\n";
}

ModelSize DeepseekV2Config::size(int64_t sequence_length) const {
  const int64_t h = hidden_size, q = num_heads * qk_dim(), out = num_heads * v_dim;
  int64_t activations = 0;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const bool sparse = layer >= dense_layers;
    const int64_t slots = sparse ? experts_per_token : 0;
    const int64_t always = sparse ? shared_experts * moe_intermediate_size : intermediate_size;
    // hidden, norm output, residual, rows, sums of experts and shared experts, output; latents
    // before and after norms, queries, rotary key, attention output; of each slot: gate and
    // up, activation, result; the same of what every token passes.
    activations += 7 * h + 2 * (q_rank + kv_rank) + q + rotary_dim + out +
      slots * (h + 3 * moe_intermediate_size) + 3 * always;
  }
  // 2 (length / 2) heads (Dqk + Dv) forward, three times that with the backward.
  const double attention = 3.0 * real(sequence_length * (q + out) * num_layers);
  return size_of<DeepseekV2Model>(*this, attention, activations);
}

DeepseekV2Layer::DeepseekV2Layer(
  const DeepseekV2Config& config, int64_t layer, const ModelPart& part)
    : config_(config), sparse_(layer >= config.dense_layers) {
  const string prefix = fmt::format("{}layers.{}.", config.prefix, layer);
  const string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  const int64_t h = config.hidden_size, heads = config.num_heads;
  input_norm_ = norm_weight(prefix + "input_layernorm.weight", h);
  // Queries or their latent, then the latent of keys and values with the rotary key.
  const int64_t kv = config.kv_rank + config.rotary_dim;
  const int64_t q = config.q_rank > 0 ? config.q_rank : heads * config.qk_dim();
  in_ = Parameter(attention + "in_proj.weight", {q + kv, h},
    {{attention + (config.q_rank > 0 ? "q_a_proj.weight" : "q_proj.weight"), {q, h}, 0},
      {attention + "kv_a_proj_with_mqa.weight", {kv, h}, q * h}},
    ParameterGroup::matrix, Init::normal);
  if (config.q_rank > 0) {
    q_norm_ = norm_weight(attention + "q_a_layernorm.weight", config.q_rank);
    q_up_ = matrix(attention + "q_b_proj.weight", heads * config.qk_dim(), config.q_rank);
  }
  kv_norm_ = norm_weight(attention + "kv_a_layernorm.weight", config.kv_rank);
  kv_up_ = matrix(
    attention + "kv_b_proj.weight", heads * (config.plain_dim + config.v_dim), config.kv_rank);
  o_ = matrix(attention + "o_proj.weight", h, heads * config.v_dim, Init::output_normal);
  post_norm_ = norm_weight(prefix + "post_attention_layernorm.weight", h);
  if (!sparse_) {
    mlp_ = SwigluMlp(mlp, config.intermediate_size, h);
    return;
  }
  experts = SwigluExperts(mlp, config, part);
  const int64_t shared = config.shared_experts * config.moe_intermediate_size;
  if (shared > 0) mlp_ = SwigluMlp(mlp + "shared_experts.", shared, h);
}

vector<Parameter*> DeepseekV2Layer::parameters() {
  return existing({&input_norm_, &in_, &q_norm_, &q_up_, &kv_norm_, &kv_up_, &o_, &post_norm_,
    &experts.router, &experts.gate_up, &experts.down, &mlp_.gate_up, &mlp_.down});
}

// (T, H) -> (T, heads Dv)
Tensor DeepseekV2Layer::mix_tokens(const LayerContext& context, const Tensor& normed) {
  const DeepseekV2Config& c = config_;
  const int64_t tokens = normed.size(0), heads = c.num_heads;
  const MicroBatch& batch = context.batch;
  const vector<Tensor> parts = at::split_with_sizes(
    linear(normed, in_), {in_.shape[0] - c.kv_rank - c.rotary_dim, c.kv_rank, c.rotary_dim}, 1);
  // A copy is normalised: the backward pass does not keep the whole projection.
  const auto latent_norm = [](const Tensor& x, Parameter& weight) {
    return rms_norm(x.contiguous(), weight, kLatentEps);
  };
  const auto turn = [&](const Tensor& x, int64_t first) {
    return rotary(x, batch.positions, context.rotary, RotaryPairs::neighbours, first);
  };
  Tensor q = c.q_rank > 0 ? linear(latent_norm(parts[0], q_norm_), q_up_) : parts[0];
  q = turn(q.view({tokens, heads, c.qk_dim()}), c.plain_dim);
  const Tensor latent = latent_norm(parts[1], kv_norm_); // (T, R)
  const Tensor rotary_key = turn(parts[2].unsqueeze(1), 0).squeeze(1); // (T, Dr)
  if (context.cache == nullptr)
    return latent_attention(q, latent, rotary_key, kv_up_, c.v_dim,
      batch.ring.empty() ? whole_ring(span_of(batch), tokens) : batch.ring, c.softmax_scale,
      context.mesh.context)
      .flatten(1);
  const auto [k, v] = expand_latent(latent, rotary_key, kv_up_, heads, c.v_dim);
  return attend_documents(context, q, k, v, c.softmax_scale).flatten(1);
}

Attended DeepseekV2Layer::attend(const LayerContext& context, const Tensor& hidden) {
  const double eps = config_.rms_norm_eps;
  Attended out;
  out.residual = hidden + linear(mix_tokens(context, rms_norm(hidden, input_norm_, eps)), o_);
  out.rows = rms_norm(out.residual, post_norm_, eps);
  if (!sparse_) return out;
  choose_routes(context, linear_fp32(out.rows, experts.router),
    {.k = config_.experts_per_token,
      .num_experts = config_.num_experts,
      .normalize = false,
      .groups = config_.groups,
      .topk_groups = config_.topk_groups,
      .scale = config_.routed_scale},
    out);
  return out;
}
}
