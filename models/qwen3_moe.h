// Qwen3-MoE (arXiv 2505.09388): grouped-query attention with RMSNorm of query and key heads, rotary
// embedding, softmax top-k routing, SwiGLU experts; some layers may be dense.
#pragma once
#include "models/common.h"

namespace pith {
struct Qwen3MoeConfig : FamilyConfig<Qwen3MoeConfig> {
  static constexpr const char* kName = "qwen3_moe";
  vector<bool> sparse; // per layer (before cut_layers), or dense
  bool norm_topk_prob;

  void read(Fields& fields);
  string to_json(ScalarType dtype) const;
  ModelSize size(int64_t sequence_length) const;
};

class Qwen3MoeLayer {
 public:
  Qwen3MoeLayer(const Qwen3MoeConfig& config, int64_t index, const ModelPart& part);

  Attended attend(const LayerContext& context, const Tensor& hidden);
  Tensor shared(const LayerContext&, const Attended& attended) { return mlp_(attended.rows); }
  SwigluExperts experts;
  static constexpr auto aggregate = sum_of_parts;
  vector<Parameter*> parameters();
 private:
  Qwen3MoeConfig config_;
  bool sparse_;
  Parameter input_norm_, qkv_, q_norm_, k_norm_, o_, post_norm_;
  SwigluMlp mlp_; // of a dense layer
};

using Qwen3MoeModel = Decoder<Qwen3MoeConfig, Qwen3MoeLayer>;
static_assert(DecoderModel<Qwen3MoeModel>);
}
