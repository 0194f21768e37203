// Qwen3.5-MoE (text): gated delta nets (arXiv 2412.06464) and, every few layers, attention with
// output gate and partly rotated heads; zero-centred RMSNorm; a gated shared expert.
#pragma once
#include "models/common.h"

namespace pith {
struct Qwen35MoeConfig : FamilyConfig<Qwen35MoeConfig> {
  static constexpr const char* kName = "qwen3_5_moe";
  int64_t key_heads, value_heads, key_dim, value_dim, taps; // of delta nets
  int64_t shared_width;
  vector<bool> delta; // per layer (before cut_layers), or attention
  bool fused_experts; // on disk: one tensor of all, or one each

  // Of the released model (text_config inside) or its text part. Weights in the folder decide on
  // names and layout, else the kind of configuration.
  void read(Fields& fields);
  static Qwen35MoeConfig parse_file(const fs::path& path);
  string to_json(ScalarType dtype) const;
  ModelSize size(int64_t sequence_length) const;

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); } // of the convolution
};

class Qwen35MoeLayer {
 public:
  Qwen35MoeLayer(const Qwen35MoeConfig& config, int64_t index, const ModelPart& part);

  Attended attend(const LayerContext& context, const Tensor& hidden);
  Tensor shared(const LayerContext& context, const Attended& attended);
  SwigluExperts experts;
  static constexpr auto aggregate = sum_of_parts;
  vector<Parameter*> parameters();
 private:
  Tensor attention(const LayerContext& context, const Tensor& normed);
  Tensor delta_net(const LayerContext& context, const Tensor& normed);

  Qwen35MoeConfig config_;
  bool delta_;
  Parameter input_norm_, post_norm_, in_, out_; // projections of either kind
  Parameter q_norm_, k_norm_; // attention; in_: q and gate by head, k, v
  Parameter conv_, a_log_, dt_bias_, norm_; // delta net; in_: q k v, z, b, a
  SwigluMlp shared_;
  Parameter shared_gate_; // (1, H)
};

using Qwen35MoeModel = Decoder<Qwen35MoeConfig, Qwen35MoeLayer>;
static_assert(DecoderModel<Qwen35MoeModel>);
}
