// DeepSeek-V2 (arXiv 2405.04434): multi-head latent attention with a rotary part of its own (YaRN),
// softmax top-k routing with or without groups, shared experts, first layers dense.
#pragma once
#include <deque>
#include <nlohmann/json_fwd.hpp>

#include "models/model.h"

namespace pith {

struct DeepseekV2Config {
  int64_t vocab_size, hidden_size, num_layers, num_heads, max_positions;
  int64_t q_rank, kv_rank;             // of the latents; q_rank 0: queries without one
  int64_t plain_dim, rope_dim, v_dim;  // a head's query and key: plain_dim + rope_dim
  int64_t num_experts, experts_per_token, moe_intermediate_size;
  int64_t shared_experts;                   // each as wide as an expert
  int64_t dense_layers, intermediate_size;  // the first layers
  int64_t groups, topk_groups;              // of experts; equal: the choice is not limited
  double routed_scale, rms_norm_eps, rope_theta, softmax_scale;
  Yarn yarn;
  bool tie_embeddings;
  std::string source_json;  // as in Qwen3MoeConfig

  // Reads a Hugging Face config.json in either style (rope_theta and rope_scaling, or
  // rope_parameters). Every missing, ill-typed or unsupported field is listed in one Error.
  static DeepseekV2Config parse(const nlohmann::json& json, const std::string& source);
  static DeepseekV2Config parse_file(const std::filesystem::path& path);
  void cut_layers(int64_t layers);  // keeps the first
  std::string to_json(at::ScalarType dtype) const;
  std::string generation_json() const;
  ModelSize size(int64_t sequence_length) const;

  int64_t qk_dim() const { return plain_dim + rope_dim; }
};

class DeepseekV2Layer {
 public:
  DeepseekV2Layer(
      const DeepseekV2Config& config, int64_t index, int64_t expert_begin, int64_t expert_end);

  Attended attend(const LayerContext& context, const Tensor& hidden);
  Tensor shared(const LayerContext& context, const Attended& attended);
  Tensor experts(const LayerContext& context, const Tensor& rows, const Tensor& row_weight,
      const ExpertPlan& plan);
  Tensor aggregate(const LayerContext& context, const Tensor& returned, const Attended& attended,
      const Tensor& shared);
  std::vector<Parameter*> parameters();

 private:
  Tensor mix_tokens(const LayerContext& context, const Tensor& normed);

  DeepseekV2Config config_;
  bool sparse_;
  Parameter input_norm_, post_norm_, o_;  // (H), (H), (H, heads Dv)
  Parameter in_;               // queries, or their latent; latent of keys and values; rotary key
  Parameter q_norm_, q_up_;    // with a query latent: (Rq), (heads Dqk, Rq)
  Parameter kv_norm_, kv_up_;  // (R), (heads (Dn + Dv), R)
  Parameter router_, experts_gate_up_, experts_down_;  // sparse: (E, H), (E, 2 I, H), (E, H, I)
  Parameter gate_up_, down_;                           // dense, or the shared experts as one
};

class DeepseekV2Model {
 public:
  using Config = DeepseekV2Config;
  using Layer = DeepseekV2Layer;

  DeepseekV2Model(Config config, const ModelPart& part);
  const Config& config() const { return config_; }
  Tensor embed(const Tensor& tokens);
  Layer& layer(int64_t index);
  Tensor final_norm(const Tensor& hidden);
  Parameter& head_weight();
  RotaryTable rotary(int64_t num_positions, at::Device device) const;
  std::vector<std::vector<Parameter*>> parameter_units();

 private:
  Config config_;
  ModelPart part_;
  Parameter embedding_, norm_, head_;
  std::deque<Layer> layers_;  // a deque: operators keep the addresses of parameters
};
static_assert(DecoderModel<DeepseekV2Model>);

}  // namespace pith
