// Qwen3-MoE (arXiv 2505.09388): grouped-query attention with per-head RMSNorm on queries and keys,
// rotary embedding, softmax top-k routing, SwiGLU experts; some layers may be dense.
#pragma once
#include "models/common.h"

namespace pith {

struct Qwen3MoeConfig : ModelConfig {
  int64_t num_kv_heads, head_dim;
  std::vector<bool> sparse;  // per layer (before cut_layers): experts or a dense MLP
  bool norm_topk_prob;

  // Reads a Hugging Face config.json in either style (num_experts or num_local_experts; rope_theta
  // or rope_parameters). Every missing, ill-typed or unsupported field is listed in one Error.
  static Qwen3MoeConfig parse(const nlohmann::json& json, const std::string& source);
  static Qwen3MoeConfig parse_file(const std::filesystem::path& path);
  std::string to_json(at::ScalarType dtype) const;
  ModelSize size(int64_t sequence_length) const;
};

class Qwen3MoeLayer {
 public:
  Qwen3MoeLayer(
      const Qwen3MoeConfig& config, int64_t index, int64_t expert_begin, int64_t expert_end);

  Attended attend(const LayerContext& context, const Tensor& hidden);
  Tensor shared(const LayerContext& context, const Attended& attended);
  Tensor experts(const LayerContext& context, const Tensor& rows, const Tensor& row_weight,
      const ExpertPlan& plan);
  Tensor aggregate(const LayerContext&, const Tensor& returned, const Attended& attended,
      const Tensor& shared) const {
    return sum_of_parts(attended, returned, shared);
  }
  std::vector<Parameter*> parameters();
 private:
  Qwen3MoeConfig config_;
  bool sparse_;
  Parameter input_norm_, qkv_, q_norm_, k_norm_, o_, post_norm_;
  Parameter router_, experts_gate_up_, experts_down_;  // sparse: (E, H), (E, 2 I, H), (E, H, I)
  Parameter gate_up_, down_;                           // dense: (2 F, H), (H, F)
};

using Qwen3MoeModel = Decoder<Qwen3MoeConfig, Qwen3MoeLayer>;
static_assert(DecoderModel<Qwen3MoeModel>);

}  // namespace pith
