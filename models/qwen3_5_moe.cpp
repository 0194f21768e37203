#include "models/qwen3_5_moe.h"
#include <nlohmann/json.hpp>
#include "operators/delta_net.h"
#include "operators/linear.h"
#include "operators/swiglu.h"

namespace pith {
namespace {
using nlohmann::json;

constexpr const char *kText = "text_config", *kNested = "model.language_model.";

// The start of a folder's index or only weight file, where names stand; "" without.
string names_of_weights(const fs::path& folder) {
  ifstream listing(folder / "model.safetensors.index.json"), file(folder / "model.safetensors");
  string names(1 << 20, ' ');
  ifstream& stream = listing ? listing : file;
  stream.read(names.data(), ssize(names));
  return names.substr(0, index(stream.gcount()));
}
}

void Qwen35MoeConfig::read(Fields& outer) {
  const bool nested = outer.has(kText) && outer[kText].is_object();
  Fields fields = nested ? Fields(outer[kText]) : outer;
  read_common(fields, *this, "qwen3_5_moe_text");
  if (nested) {
    outer.only("model_type", "qwen3_5_moe");
    tie_embeddings = outer.flag("tie_word_embeddings", tie_embeddings);
    prefix = kNested;
  }
  fused_experts = nested;
  read_heads(fields, *this, 2, 256);
  zero_centred = true;
  max_positions = fields.count_or("max_position_embeddings", 32768);
  intermediate_size = moe_intermediate_size; // none is dense
  shared_width = fields.count("shared_expert_intermediate_size");
  taps = fields.count_or("linear_conv_kernel_dim", 4);
  key_heads = fields.count_or("linear_num_key_heads", 16);
  value_heads = fields.count_or("linear_num_value_heads", 32);
  key_dim = fields.count_or("linear_key_head_dim", 128);
  value_dim = fields.count_or("linear_value_head_dim", 128);
  delta = layers_of_type(
    fields, num_layers, "linear_attention", fields.count_or("full_attention_interval", 4));
  // Text positions are the same on all axes of mrope: its sections change nothing.
  const double partial = min(read_rope(fields, *this, /*yarn=*/false).partial, 2.0);
  rotary_dim = int64_t(partial * real(head_dim));
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > head_dim)
    fields.problem("partial_rotary_factor", "must give an even part of head_dim");
  if (value_heads % key_heads != 0)
    fields.problem("linear_num_key_heads", "must divide linear_num_value_heads");
  fields.only("attention_bias", false);
  fields.only("attn_output_gate", true);
  fields.only("mamba_ssm_dtype", "float32");
  fields.only("mlp_only_layers", json::array());
  outer.add_problems(fields);
}

Qwen35MoeConfig Qwen35MoeConfig::parse_file(const fs::path& path) {
  Qwen35MoeConfig config = FamilyConfig::parse_file(path);
  if (const string names = names_of_weights(path); !names.empty()) {
    config.fused_experts = names.find(".experts.gate_up_proj\"") != string::npos;
    config.prefix = names.find(kNested) != string::npos ? kNested : "model.";
  }
  return config;
}

string Qwen35MoeConfig::to_json(ScalarType dtype) const {
  json object = json::parse(source_json);
  const bool nested = object.contains(kText);
  const string part = (nested ? object[kText] : object).dump();
  json text = config_for_export(part, "Qwen3_5MoeForCausalLM", num_layers, dtype);
  if (text.contains("mtp_num_hidden_layers")) text["mtp_num_hidden_layers"] = 0; // not written
  if (!nested) return text.dump(2) + "\n";
  object["architectures"] = text["architectures"];
  object["dtype"] = text["dtype"];
  object.erase("torch_dtype");
  object[kText] = text;
  return object.dump(2) + "\n";
}

ModelSize Qwen35MoeConfig::size(int64_t sequence_length) const {
  const int64_t h = hidden_size, q = num_heads * head_dim, kv = num_kv_heads * head_dim;
  const int64_t in = channels() + values() + 2 * value_heads; // of a delta net
  int64_t activations = 0;
  double mixing = 0;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const bool is_delta = delta[index(layer)];
    // Token by token: three products with the state forward, twice that backward.
    mixing += is_delta ? 18.0 * real(values() * key_dim) : 6.0 * real(sequence_length * q);
    // hidden, norm output, residual, rows, sums of experts and shared expert, output; projections,
    // then convolved q, k, v, result, normed, gated, or normed and turned q and k, result, gated;
    // of each slot: gate and up, activation, result; the same of the shared expert.
    activations += 7 * h + (is_delta ? in + channels() + 3 * values() : 6 * q + 4 * kv) +
      experts_per_token * (h + 3 * moe_intermediate_size) + 3 * shared_width;
  }
  ModelSize size = size_of<Qwen35MoeModel>(*this, mixing, activations);
  const auto deltas = ranges::count(delta.begin(), delta.begin() + num_layers, true);
  size.scratch_per_token = deltas > 0 ? 34.0 * 4 * double(values()) : 0; // FP32
  size.slow_seconds_per_token = 4.6e-6 * double(deltas);
  return size;
}

Qwen35MoeLayer::Qwen35MoeLayer(const Qwen35MoeConfig& config, int64_t layer, const ModelPart& part)
    : config_(config), delta_(config.delta.at(index(layer))) {
  const Qwen35MoeConfig& c = config;
  const string prefix = fmt::format("{}layers.{}.", c.prefix, layer), mlp = prefix + "mlp.",
               mixer = prefix + (delta_ ? "linear_attn." : "self_attn.");
  const int64_t h = c.hidden_size, q = c.num_heads * c.head_dim, width = c.moe_intermediate_size;
  input_norm_ = norm_weight(prefix + "input_layernorm.weight", h, /*zero_centred=*/true);
  post_norm_ = norm_weight(prefix + "post_attention_layernorm.weight", h, /*zero_centred=*/true);
  if (delta_) {
    const int64_t heads = c.value_heads, z = c.channels(), b = z + c.values(), a = b + heads;
    in_ = Parameter(mixer + "in_proj.weight", {a + heads, h},
      {{mixer + "in_proj_qkv.weight", {z, h}, 0}, {mixer + "in_proj_z.weight", {b - z, h}, z * h},
        {mixer + "in_proj_b.weight", {heads, h}, b * h},
        {mixer + "in_proj_a.weight", {heads, h}, a * h}},
      ParameterGroup::matrix, Init::normal);
    conv_ = Parameter(
      mixer + "conv1d.weight", {c.channels(), 1, c.taps}, ParameterGroup::bias, Init::normal);
    a_log_ = Parameter(mixer + "A_log", {c.value_heads}, ParameterGroup::bias, Init::log_decay);
    dt_bias_ = Parameter(mixer + "dt_bias", {c.value_heads}, ParameterGroup::bias, Init::ones);
    norm_ = norm_weight(mixer + "norm.weight", c.value_dim);
    out_ = matrix(mixer + "out_proj.weight", h, c.values(), Init::output_normal);
  } else {
    in_ = qkv_weight(mixer, 2 * q, c.num_kv_heads * c.head_dim, h);
    q_norm_ = norm_weight(mixer + "q_norm.weight", c.head_dim, /*zero_centred=*/true);
    k_norm_ = norm_weight(mixer + "k_norm.weight", c.head_dim, /*zero_centred=*/true);
    out_ = matrix(mixer + "o_proj.weight", h, q, Init::output_normal);
  }
  experts = SwigluExperts(mlp, c, part);
  if (c.fused_experts) {
    const auto held = [&](const string& name, int64_t out, int64_t in, Init init,
                        Fused fused = Fused::none) {
      const vector<int64_t> shape{part.expert_end - part.expert_begin, out, in};
      return Parameter(name, shape, {{name, shape, 0, part.expert_begin, c.num_experts, fused}},
        ParameterGroup::expert, init);
    };
    experts.gate_up = held(mlp + "experts.gate_up_proj", 2 * width, h, Init::normal, Fused::rows);
    experts.down = held(mlp + "experts.down_proj", h, width, Init::output_normal);
  }
  shared_ = SwigluMlp(mlp + "shared_expert.", c.shared_width, h);
  shared_gate_ =
    Parameter(mlp + "shared_expert_gate.weight", {1, h}, ParameterGroup::router, Init::normal);
}

vector<Parameter*> Qwen35MoeLayer::parameters() {
  return existing({&input_norm_, &in_, &q_norm_, &k_norm_, &conv_, &a_log_, &dt_bias_, &norm_,
    &out_, &post_norm_, &experts.router, &experts.gate_up, &experts.down, &shared_.gate_up,
    &shared_.down, &shared_gate_});
}

// (T, H) -> (T, Hq D)
Tensor Qwen35MoeLayer::attention(const LayerContext& context, const Tensor& normed) {
  const int64_t d = config_.head_dim, q_size = config_.num_heads * d;
  const int64_t kv_size = config_.num_kv_heads * d;
  const vector<Tensor> parts =
    at::split_with_sizes(linear(normed, in_), {2 * q_size, kv_size, kv_size}, 1);
  const Tensor q_gate = parts[0].unflatten(1, {config_.num_heads, 2 * d}); // (T, Hq, 2 D)
  const auto heads = [&](const Tensor& x) { return x.unflatten(1, {config_.num_kv_heads, d}); };
  const auto turned = [&](const Tensor& x, Parameter& weight) {
    return rotary(rms_norm(x, weight, config_.rms_norm_eps, /*zero_centred=*/true),
      context.batch.positions, context.rotary);
  };
  const Tensor mixed = attend_documents(context, turned(q_gate.narrow(2, 0, d), q_norm_),
    turned(heads(parts[1]), k_norm_), heads(parts[2]), 1 / sqrt(real(d)));
  return (mixed * at::sigmoid(q_gate.narrow(2, d, d))).flatten(1);
}

// (T, H) -> (T, Hv Dv)
Tensor Qwen35MoeLayer::delta_net(const LayerContext& context, const Tensor& normed) {
  const Qwen35MoeConfig& c = config_;
  const MicroBatch& batch = context.batch;
  const Tensor projected = linear(normed, in_);
  // A run of tokens, with what was before each part while generating.
  const auto mix = [&](int64_t first, int64_t count, const TokenParts& parts,
                     const DeltaCache& cache) {
    const vector<Tensor> in = at::split_with_sizes(projected.narrow(0, first, count),
      {c.channels(), c.values(), c.value_heads, c.value_heads}, 1);
    const vector<Tensor> qkv = at::split_with_sizes(
      causal_convolution(in[0], conv_, parts, cache.tokens), {c.keys(), c.keys(), c.values()}, 1);
    const auto heads = [](const Tensor& x, int64_t n) { return x.unflatten(1, {n, -1}); };
    const Tensor out = gated_delta_rule(heads(qkv[0], c.key_heads), heads(qkv[1], c.key_heads),
      heads(qkv[2], c.value_heads), {in[3], in[2], a_log_, dt_bias_}, parts, cache.state);
    const Tensor normed_out = rms_norm(out, norm_, c.rms_norm_eps);
    const Tensor gate_up = at::cat({heads(in[1], c.value_heads), normed_out}, 2);
    return swiglu(gate_up.flatten(0, 1)).view({count, c.values()}); // times SiLU(z)
  };
  const int64_t tokens = normed.size(0), sequences = batch.cu_seqlens_host.numel() - 1;
  if (context.cache == nullptr)
    return mix(0, tokens,
      token_parts(batch.positions, batch.cu_seqlens_host, batch.num_rows, context.mesh.context),
      {});
  DeltaCache& cache = context.cache->delta;
  if (!cache.state.defined()) {
    cache.tokens = at::zeros({sequences, c.taps - 1, c.channels()}, projected.options());
    cache.state = at::zeros({sequences, c.value_heads, c.key_dim, c.value_dim},
      projected.options().dtype(wide_dtype(projected.scalar_type())));
  }
  PITH_CHECK(cache.state.size(0) == sequences, "the cache holds {} sequences, the batch {}",
    cache.state.size(0), sequences);
  const TokenParts side_by_side = token_parts(batch.positions, batch.cu_seqlens_host, sequences);
  if (side_by_side.count == sequences) return mix(0, tokens, side_by_side, cache);
  vector<Tensor> out;
  const int32_t* border = batch.cu_seqlens_host.const_data_ptr<int32_t>();
  for (int64_t s = 0; s < sequences; ++s)
    out.push_back(mix(border[s], border[s + 1] - border[s],
      {batch.positions.narrow(0, border[s], border[s + 1] - border[s])},
      {cache.tokens.narrow(0, s, 1), cache.state.narrow(0, s, 1)}));
  return at::cat(out);
}

Attended Qwen35MoeLayer::attend(const LayerContext& context, const Tensor& hidden) {
  const double eps = config_.rms_norm_eps;
  const Tensor normed = rms_norm(hidden, input_norm_, eps, /*zero_centred=*/true);
  Attended out;
  out.residual =
    hidden + linear(delta_ ? delta_net(context, normed) : attention(context, normed), out_);
  out.rows = rms_norm(out.residual, post_norm_, eps, /*zero_centred=*/true);
  choose_routes(context, linear_fp32(out.rows, experts.router),
    {.k = config_.experts_per_token, .num_experts = config_.num_experts, .normalize = true}, out);
  return out;
}

Tensor Qwen35MoeLayer::shared(const LayerContext&, const Attended& attended) {
  return shared_(attended.rows) * at::sigmoid(linear(attended.rows, shared_gate_));
}
}
