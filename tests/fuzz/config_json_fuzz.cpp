// config.json of a model folder: JSON, then the fields of each family.
#include <nlohmann/json.hpp>

#include "engine/hf_folder.h"
#include "models/deepseek_v2.h"
#include "models/qwen3_moe.h"
#include "tests/fuzz/fuzz.h"

PITH_FUZZ(text) {
  const nlohmann::json json = pith::parse_json(text, "fuzz");
  if (json.is_object() && json.value("model_type", nlohmann::json()) == "deepseek_v2")
    pith::DeepseekV2Config::parse(json, "fuzz");
  else
    pith::Qwen3MoeConfig::parse(json, "fuzz");
}
