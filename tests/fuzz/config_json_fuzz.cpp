// config.json of a model folder: JSON, then the fields of each family.
#include <nlohmann/json.hpp>
#include "engine/hf_folder.h"
#include "models/deepseek_v2.h"
#include "models/gpt_oss.h"
#include "models/qwen3_5_moe.h"
#include "models/qwen3_moe.h"
#include "tests/fuzz/fuzz.h"

PITH_FUZZ(text) {
  const nlohmann::json json = pith::parse_json(text, "fuzz");
  const auto family =
    json.is_object() ? json.value("model_type", nlohmann::json()) : nlohmann::json();
  if (family == "deepseek_v2") pith::DeepseekV2Config::parse(json, "fuzz");
  else if (family == "gpt_oss") pith::GptOssConfig::parse(json, "fuzz");
  else if (family == "qwen3_5_moe" || family == "qwen3_5_moe_text")
    pith::Qwen35MoeConfig::parse(json, "fuzz");
  else pith::Qwen3MoeConfig::parse(json, "fuzz");
}
