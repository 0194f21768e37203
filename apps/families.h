// The one switch from model_type to a model family.
#pragma once
#include <utility>

#include "engine/hf_folder.h"
#include "models/deepseek_v2.h"
#include "models/gpt_oss.h"
#include "models/qwen3_moe.h"

namespace pith {

// The model_type of a config.json, or of the one in a folder.
std::string read_model_type(const std::filesystem::path& path);

// Calls use.operator()<Model>() with the family that the model_type of a config.json names. `path`:
// the file or its folder.
template <class Use>
auto with_family(const std::filesystem::path& path, Use&& use) {
  const std::string family = read_model_type(path);
  if (family == "qwen3_moe") return use.template operator()<Qwen3MoeModel>();
  if (family == "deepseek_v2") return use.template operator()<DeepseekV2Model>();
  if (family == "gpt_oss") return use.template operator()<GptOssModel>();
  PITH_FAIL_HINT("supported: qwen3_moe, deepseek_v2, gpt_oss",
      "{}: model_type \"{}\" is not supported", path.string(), family);
}

}  // namespace pith
