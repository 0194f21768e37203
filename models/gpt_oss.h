// GPT-OSS (arXiv 2508.10925): attention with sinks and, in some layers, a sliding window, YaRN,
// biases, softmax over chosen experts, clamped SwiGLU.
#pragma once
#include "models/common.h"

namespace pith {
// Weights may be in MXFP4.
struct GptOssConfig : FamilyConfig<GptOssConfig> {
  static constexpr const char* kName = "gpt_oss";
  vector<bool> windowed; // per layer (before cut_layers)
  double swiglu_alpha, swiglu_limit;

  void read(Fields& fields);
  string to_json(ScalarType dtype) const; // never of MXFP4
  ModelSize size(int64_t sequence_length) const;
};

class GptOssLayer {
 public:
  GptOssLayer(const GptOssConfig& config, int64_t index, const ModelPart& part);

  Attended attend(const LayerContext& context, const Tensor& hidden);
  Tensor shared(const LayerContext&, const Attended&) { return {}; }
  Tensor experts(const LayerContext& context, const Tensor& rows, const Tensor& row_weight,
    const ExpertPlan& plan);
  static constexpr auto aggregate = sum_of_parts;
  vector<Parameter*> parameters();
 private:
  GptOssConfig config_;
  int64_t window_; // 0: none
  Parameter input_norm_, qkv_, qkv_bias_, sinks_, o_, o_bias_, post_norm_;
  Parameter router_, router_bias_; // (E, H), (E)
  // Gates and ups alternate: (E, H, 2 I), (E, 2 I), (E, I, H), (E, H); E: of experts held.
  Parameter gate_up_, gate_up_bias_, down_, down_bias_;
};

using GptOssModel = Decoder<GptOssConfig, GptOssLayer>;
static_assert(DecoderModel<GptOssModel>);
}
