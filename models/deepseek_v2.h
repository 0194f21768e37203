// DeepSeek-V2 (arXiv 2405.04434): multi-head latent attention with its own rotary part (YaRN),
// softmax top-k routing, in groups or not, shared experts, first layers dense.
#pragma once
#include "models/common.h"

namespace pith {
struct DeepseekV2Config : FamilyConfig<DeepseekV2Config> {
  static constexpr const char* kName = "deepseek_v2";
  int64_t q_rank, kv_rank; // q_rank 0: queries have no latent
  int64_t plain_dim, v_dim; // a query's or key's head: plain_dim + rotary_dim
  int64_t dense_layers; // the first
  int64_t shared_experts; // each as wide as an expert
  int64_t groups, topk_groups; // of experts; equal: no limit
  double routed_scale, softmax_scale;

  void read(Fields& fields);
  string to_json(ScalarType dtype) const;
  ModelSize size(int64_t sequence_length) const;

  int64_t qk_dim() const { return plain_dim + rotary_dim; }
};

class DeepseekV2Layer {
 public:
  DeepseekV2Layer(const DeepseekV2Config& config, int64_t index, const ModelPart& part);

  Attended attend(const LayerContext& context, const Tensor& hidden);
  Tensor shared(const LayerContext&, const Attended& attended) { return mlp_(attended.rows); }
  SwigluExperts experts;
  static constexpr auto aggregate = sum_of_parts;
  vector<Parameter*> parameters();
 private:
  Tensor mix_tokens(const LayerContext& context, const Tensor& normed);

  DeepseekV2Config config_;
  bool sparse_;
  Parameter input_norm_, post_norm_, o_; // (H), (H), (H, heads Dv)
  Parameter in_; // queries or their latent; latent of keys, values; rotary key
  Parameter q_norm_, q_up_; // with a query latent: (Rq), (heads Dqk, Rq)
  Parameter kv_norm_, kv_up_; // (R), (heads (Dn + Dv), R)
  SwigluMlp mlp_; // dense, or all shared experts
};

using DeepseekV2Model = Decoder<DeepseekV2Config, DeepseekV2Layer>;
static_assert(DecoderModel<DeepseekV2Model>);
}
