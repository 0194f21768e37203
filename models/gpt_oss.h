// GPT-OSS (arXiv 2508.10925): attention with sinks and, in some layers, a sliding window, YaRN,
// biases, softmax over the chosen experts, clamped SwiGLU.
#pragma once
#include "models/common.h"

namespace pith {

struct GptOssConfig : ModelConfig {
  int64_t num_kv_heads, head_dim;
  std::vector<bool> windowed;  // per layer (before cut_layers)
  double swiglu_alpha, swiglu_limit;

  // Reads a Hugging Face config.json in either style (rope_theta and rope_scaling, or
  // rope_parameters), of weights in MXFP4 or not. Every missing, ill-typed or unsupported field is
  // listed in one Error.
  static GptOssConfig parse(const nlohmann::json& json, const std::string& source);
  static GptOssConfig parse_file(const std::filesystem::path& path);
  std::string to_json(at::ScalarType dtype) const;  // never of MXFP4
  ModelSize size(int64_t sequence_length) const;
};

class GptOssLayer {
 public:
  GptOssLayer(const GptOssConfig& config, int64_t index, int64_t expert_begin, int64_t expert_end);

  Attended attend(const LayerContext& context, const Tensor& hidden);
  Tensor shared(const LayerContext&, const Attended&) { return {}; }
  Tensor experts(const LayerContext& context, const Tensor& rows, const Tensor& row_weight,
      const ExpertPlan& plan);
  Tensor aggregate(const LayerContext& context, const Tensor& returned, const Attended& attended,
      const Tensor& shared);
  std::vector<Parameter*> parameters();
 private:
  GptOssConfig config_;
  int64_t window_;  // 0: none
  Parameter input_norm_, qkv_, qkv_bias_, sinks_, o_, o_bias_, post_norm_;
  Parameter router_, router_bias_;  // (E, H), (E)
  // Gates and ups alternate: (E, H, 2 I), (E, 2 I), (E, I, H), (E, H); of E the experts held.
  Parameter gate_up_, gate_up_bias_, down_, down_bias_;
};

using GptOssModel = Decoder<GptOssConfig, GptOssLayer>;
static_assert(DecoderModel<GptOssModel>);

}  // namespace pith
