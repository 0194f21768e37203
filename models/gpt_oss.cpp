#include "models/gpt_oss.h"
#include <nlohmann/json.hpp>
#include "operators/grouped_linear.h"
#include "operators/linear.h"
#include "operators/swiglu.h"

namespace pith {
using nlohmann::json;

void GptOssConfig::read(Fields& fields) {
  read_common(fields, *this, kName, "num_local_experts", "intermediate_size");
  read_heads(fields, *this, 8, 64);
  intermediate_size = moe_intermediate_size; // none is dense
  rms_norm_eps = fields.number("rms_norm_eps", 1e-5);
  max_positions = fields.count_or("max_position_embeddings", 131072);
  window = fields.count_or("sliding_window", 128);
  windowed = layers_of_type(fields, num_layers, "sliding_attention", /*interval=*/2);
  swiglu_alpha = fields.number("swiglu_alpha", 1.702);
  swiglu_limit = fields.number("swiglu_limit", 7.0);
  if (read_rope(fields, *this, /*yarn=*/true).softmax_factor != 1)
    fields.problem("rope_scaling.mscale_all_dim", "is not supported");
  fields.only("attention_bias", true);
  if (fields.has("quantization_config")) {
    Fields packed(fields["quantization_config"], "quantization_config.");
    packed.only("quant_method", "mxfp4");
    fields.add_problems(packed);
  }
}

string GptOssConfig::to_json(ScalarType dtype) const {
  json object = config_for_export(source_json, "GptOssForCausalLM", num_layers, dtype);
  object.erase("quantization_config"); // what is written is not packed
  return object.dump(2) + "\n";
}

ModelSize GptOssConfig::size(int64_t sequence_length) const {
  const int64_t h = hidden_size, q = num_heads * head_dim, kv = num_kv_heads * head_dim;
  // hidden, norm output, residual, rows, experts' sum, output; q and k before and after rotary, v,
  // attention output; of each slot: gate and up, activation, result.
  const int64_t activations =
    6 * h + 3 * q + 3 * kv + experts_per_token * (h + 3 * moe_intermediate_size);
  double keys = 0; // that a token meets: mean over positions, all layers
  const double length = real(sequence_length), w = real(window);
  for (size_t i = 0; i < index(num_layers); ++i)
    keys += windowed[i] && w < length ? w - w * w / (2 * length) : length / 2;
  // 2 x 2 x keys x heads x head_dim forward, three times that with the backward.
  return size_of<GptOssModel>(*this, 12.0 * keys * real(q), num_layers * activations);
}

GptOssLayer::GptOssLayer(const GptOssConfig& config, int64_t layer, const ModelPart& part)
    : config_(config), window_(config.windowed.at(index(layer)) ? config.window : 0) {
  const string prefix = fmt::format("{}layers.{}.", config.prefix, layer);
  const string attention = prefix + "self_attn.", router = prefix + "mlp.router.",
               experts = prefix + "mlp.experts.";
  const int64_t h = config.hidden_size, q = config.num_heads * config.head_dim,
                kv = config.num_kv_heads * config.head_dim, width = config.moe_intermediate_size,
                count = config.num_experts;
  input_norm_ = norm_weight(prefix + "input_layernorm.weight", h);
  qkv_ = qkv_weight(attention, q, kv, h);
  qkv_bias_ = Parameter(attention + "qkv_proj.bias", {q + 2 * kv},
    {{attention + "q_proj.bias", {q}, 0}, {attention + "k_proj.bias", {kv}, q},
      {attention + "v_proj.bias", {kv}, q + kv}},
    ParameterGroup::bias, Init::zeros);
  const auto bias = [](const string& name, int64_t size, Init init) {
    return Parameter(name, {size}, ParameterGroup::bias, init);
  };
  sinks_ = bias(attention + "sinks", config.num_heads, Init::normal);
  o_ = matrix(attention + "o_proj.weight", h, q, Init::output_normal);
  o_bias_ = bias(attention + "o_proj.bias", h, Init::zeros);
  post_norm_ = norm_weight(prefix + "post_attention_layernorm.weight", h);
  router_ = Parameter(router + "weight", {count, h}, ParameterGroup::router, Init::normal);
  router_bias_ = bias(router + "bias", count, Init::normal);
  const auto held = [&](const char* name, vector<int64_t> shape, Init init,
                      Fused fused = Fused::none) {
    shape.insert(shape.begin(), part.expert_end - part.expert_begin);
    return Parameter(experts + name, shape,
      {{experts + name, shape, 0, part.expert_begin, count, fused}}, ParameterGroup::expert, init);
  };
  gate_up_ = held("gate_up_proj", {h, 2 * width}, Init::normal, Fused::columns);
  gate_up_bias_ = held("gate_up_proj_bias", {2 * width}, Init::zeros);
  down_ = held("down_proj", {width, h}, Init::output_normal);
  down_bias_ = held("down_proj_bias", {h}, Init::zeros);
}

vector<Parameter*> GptOssLayer::parameters() {
  return {&input_norm_, &qkv_, &qkv_bias_, &sinks_, &o_, &o_bias_, &post_norm_, &router_,
    &router_bias_, &gate_up_, &gate_up_bias_, &down_, &down_bias_};
}

Attended GptOssLayer::attend(const LayerContext& context, const Tensor& hidden) {
  const int64_t tokens = hidden.size(0), d = config_.head_dim;
  const int64_t q_size = config_.num_heads * d, kv_size = config_.num_kv_heads * d;
  const Tensor qkv = linear(rms_norm(hidden, input_norm_, config_.rms_norm_eps), qkv_, &qkv_bias_);
  const vector<Tensor> parts = at::split_with_sizes(qkv, {q_size, kv_size, kv_size}, 1);
  const auto heads = [&](const Tensor& x) { return x.view({tokens, x.size(1) / d, d}); };
  const auto turned = [&](const Tensor& x) {
    return rotary(heads(x), context.batch.positions, context.rotary);
  };
  const Tensor mixed = attend_documents(context, turned(parts[0]), turned(parts[1]),
    heads(parts[2]), 1 / sqrt(real(d)), {.window = window_, .sinks = &sinks_}); // (T, Hq, D)

  Attended out;
  out.residual = hidden + linear(mixed.reshape({tokens, q_size}), o_, &o_bias_);
  out.rows = rms_norm(out.residual, post_norm_, config_.rms_norm_eps);
  // The softmax over chosen logits is that over all, over the sum of the chosen.
  choose_routes(context, linear_fp32(out.rows, router_, &router_bias_),
    {.k = config_.experts_per_token, .num_experts = config_.num_experts, .normalize = true}, out);
  return out;
}

Tensor GptOssLayer::experts(
  const LayerContext&, const Tensor& rows, const Tensor& row_weight, const ExpertPlan& plan) {
  const SwigluForm form{float(config_.swiglu_alpha), float(config_.swiglu_limit), 1, true};
  const Tensor activated = permuted_swiglu(rows, gate_up_, plan, form, &gate_up_bias_);
  return unpermute(grouped_affine(activated, down_, down_bias_, plan), row_weight, plan);
}
}
