#include "models/deepseek_v2.h"

#include <ATen/ops/split_with_sizes.h>

#include <nlohmann/json.hpp>

#include "operators/linear.h"
#include "operators/swiglu.h"

namespace pith {
namespace {

using nlohmann::json;

constexpr double kLatentEps = 1e-6;  // of the latents' norms, whatever rms_norm_eps says

// One projection: queries or their latent, then the latent of keys and values with the rotary key.
Parameter in_weight(const DeepseekV2Config& c, const std::string& prefix) {
  const int64_t h = c.hidden_size, kv = c.kv_rank + c.rotary_dim;
  const int64_t q = c.q_rank > 0 ? c.q_rank : c.num_heads * c.qk_dim();
  return Parameter(prefix + "in_proj.weight", {q + kv, h},
      {{prefix + (c.q_rank > 0 ? "q_a_proj.weight" : "q_proj.weight"), {q, h}, 0},
          {prefix + "kv_a_proj_with_mqa.weight", {kv, h}, q * h}},
      ParameterGroup::matrix, Init::normal);
}

}  // namespace

DeepseekV2Config DeepseekV2Config::parse(const json& object, const std::string& source) {
  PITH_CHECK(object.is_object(), "{}: a model configuration must be a JSON object", source);
  Fields fields(object);
  DeepseekV2Config c;
  read_common(fields, c, "deepseek_v2");
  c.max_positions = fields.count_or("max_position_embeddings", 2048);
  c.q_rank = fields.count_or("q_lora_rank", 0);
  c.kv_rank = fields.count("kv_lora_rank");
  c.plain_dim = fields.count("qk_nope_head_dim");
  c.rotary_dim = fields.count("qk_rope_head_dim");
  c.v_dim = fields.count("v_head_dim");
  c.num_experts = fields.count("n_routed_experts");
  c.shared_experts = fields.count_or("n_shared_experts", 0, 0);
  c.dense_layers = fields.count_or("first_k_dense_replace", 0, 0);
  c.intermediate_size = fields.count_or("intermediate_size", 1);
  c.routed_scale = fields.number("routed_scaling_factor", 1);
  const RopeFields rope = read_rope(fields, /*yarn=*/true);
  c.rope_theta = rope.theta;
  c.yarn = rope.yarn;
  c.softmax_scale = rope.softmax_factor / std::sqrt(static_cast<double>(c.qk_dim()));
  c.groups = c.topk_groups = 1;
  if (fields.has("topk_method") && fields["topk_method"] == "group_limited_greedy") {
    c.groups = fields.count("n_group");
    c.topk_groups = fields.count("topk_group");
    if (c.num_experts % c.groups != 0 || c.topk_groups > c.groups)
      fields.problem("n_group", "must divide n_routed_experts and be topk_group or more");
  } else {
    fields.only("topk_method", "greedy");
  }
  if (c.experts_per_token > c.num_experts / c.groups * c.topk_groups)
    fields.problem(
        "num_experts_per_tok", "must not be larger than the number of experts to choose from");
  if (c.rotary_dim % 2 != 0) fields.problem("qk_rope_head_dim", "must be even");
  if (c.dense_layers > 0 && !fields.has("intermediate_size"))
    fields.problem("intermediate_size", "is missing");
  fields.only("num_key_value_heads", c.num_heads);
  fields.only("moe_layer_freq", 1);
  fields.only("scoring_func", "softmax");
  fields.only("norm_topk_prob", false);
  fields.only("attention_bias", false);
  fields.only("mlp_bias", false);
  PITH_CHECK(fields.problems().empty(), "{}: not a usable deepseek_v2 configuration:{}", source,
      fields.problems());
  c.source_json = object.dump();
  return c;
}

DeepseekV2Config DeepseekV2Config::parse_file(const std::filesystem::path& path) {
  return parse(read_config(path), path.string());
}

std::string DeepseekV2Config::to_json(at::ScalarType dtype) const {
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
    // before and after their norms, queries, rotary key, attention output; each slot's row, gate
    // and up, activation, result; the same of what every token passes.
    activations += 7 * h + 2 * (q_rank + kv_rank) + q + rotary_dim + out +
        slots * (2 * h + 3 * moe_intermediate_size) + 3 * always;
  }
  // Attention: 2 (length / 2) heads (Dqk + Dv) forward, three times that with the backward pass.
  const double attention = 3.0 * static_cast<double>(sequence_length * (q + out) * num_layers);
  return size_of<DeepseekV2Model>(*this, attention, activations);
}

DeepseekV2Layer::DeepseekV2Layer(
    const DeepseekV2Config& config, int64_t index, int64_t expert_begin, int64_t expert_end)
    : config_(config), sparse_(index >= config.dense_layers) {
  const std::string prefix = layer_prefix(index), attention = prefix + "self_attn.",
                    mlp = prefix + "mlp.";
  const int64_t h = config.hidden_size, heads = config.num_heads;
  const auto matrix = [](const std::string& name, int64_t out, int64_t in, Init init) {
    return Parameter(name, {out, in}, ParameterGroup::matrix, init);
  };
  input_norm_ = norm_weight(prefix + "input_layernorm.weight", h);
  in_ = in_weight(config, attention);
  if (config.q_rank > 0) {
    q_norm_ = norm_weight(attention + "q_a_layernorm.weight", config.q_rank);
    q_up_ =
        matrix(attention + "q_b_proj.weight", heads * config.qk_dim(), config.q_rank, Init::normal);
  }
  kv_norm_ = norm_weight(attention + "kv_a_layernorm.weight", config.kv_rank);
  kv_up_ = matrix(attention + "kv_b_proj.weight", heads * (config.plain_dim + config.v_dim),
      config.kv_rank, Init::normal);
  o_ = matrix(attention + "o_proj.weight", h, heads * config.v_dim, Init::output_normal);
  post_norm_ = norm_weight(prefix + "post_attention_layernorm.weight", h);
  const int64_t width = config.moe_intermediate_size;
  if (sparse_) {
    router_ = Parameter(
        mlp + "gate.weight", {config.num_experts, h}, ParameterGroup::router, Init::normal);
    experts_gate_up_ = expert_gate_up_weight(mlp, width, h, expert_begin, expert_end);
    experts_down_ = expert_down_weight(mlp, width, h, expert_begin, expert_end);
  }
  const int64_t always = sparse_ ? config.shared_experts * width : config.intermediate_size;
  if (always > 0) {
    const std::string name = sparse_ ? mlp + "shared_experts." : mlp;
    gate_up_ = gate_up_weight(name, always, h);
    down_ = matrix(name + "down_proj.weight", h, always, Init::output_normal);
  }
}

std::vector<Parameter*> DeepseekV2Layer::parameters() {
  std::vector<Parameter*> all;
  for (Parameter* parameter : {&input_norm_, &in_, &q_norm_, &q_up_, &kv_norm_, &kv_up_, &o_,
           &post_norm_, &router_, &experts_gate_up_, &experts_down_, &gate_up_, &down_})
    if (!parameter->shape.empty()) all.push_back(parameter);
  return all;
}

// normed (T, H) -> (T, heads Dv)
Tensor DeepseekV2Layer::mix_tokens(const LayerContext& context, const Tensor& normed) {
  const DeepseekV2Config& c = config_;
  const int64_t tokens = normed.size(0), heads = c.num_heads;
  const MicroBatch& batch = context.batch;
  const std::vector<Tensor> parts = at::split_with_sizes(
      linear(normed, in_), {in_.shape[0] - c.kv_rank - c.rotary_dim, c.kv_rank, c.rotary_dim}, 1);
  // A copy is normalised, so that the backward pass does not keep the whole projection.
  const auto latent_norm = [](const Tensor& x, Parameter& weight) {
    return rms_norm(x.contiguous(), weight, kLatentEps);
  };
  const auto turn = [&](const Tensor& x, int64_t first) {
    return rotary(x, batch.positions, context.rotary, RotaryPairs::neighbours, first);
  };
  Tensor q = c.q_rank > 0 ? linear(latent_norm(parts[0], q_norm_), q_up_) : parts[0];
  q = turn(q.view({tokens, heads, c.qk_dim()}), c.plain_dim);
  const Tensor latent = latent_norm(parts[1], kv_norm_);                // (T, R)
  const Tensor rotary_key = turn(parts[2].unsqueeze(1), 0).squeeze(1);  // (T, Dr)
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
  choose_routes(context, linear_fp32(out.rows, router_),
      {.k = config_.experts_per_token,
          .num_experts = config_.num_experts,
          .normalize = false,
          .groups = config_.groups,
          .topk_groups = config_.topk_groups,
          .scale = config_.routed_scale},
      out);
  return out;
}

Tensor DeepseekV2Layer::shared(const LayerContext&, const Attended& attended) {
  if (gate_up_.shape.empty()) return {};
  return linear(swiglu(linear(attended.rows, gate_up_)), down_);
}

Tensor DeepseekV2Layer::experts(
    const LayerContext&, const Tensor& rows, const Tensor& row_weight, const ExpertPlan& plan) {
  return swiglu_experts(rows, row_weight, experts_gate_up_, experts_down_, plan);
}

}  // namespace pith
