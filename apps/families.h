// The one switch from model_type to a model family, and the loading of a whole model.
#pragma once
#include "apps/commands.h"
#include "core/device.h"
#include "engine/checkpoint.h"
#include "models/deepseek_v2.h"
#include "models/gpt_oss.h"
#include "models/qwen3_5_moe.h"
#include "models/qwen3_moe.h"

namespace pith {
// Calls use.operator()<Model>() with the family of a config.json, or of the one in a folder.
template <class Use> auto with_family(const fs::path& path, Use&& use) {
  const string family = read_model_type(path);
  if (family == "qwen3_moe") return use.template operator()<Qwen3MoeModel>();
  if (family == "deepseek_v2") return use.template operator()<DeepseekV2Model>();
  if (family == "gpt_oss") return use.template operator()<GptOssModel>();
  if (family == "qwen3_5_moe" || family == "qwen3_5_moe_text")
    return use.template operator()<Qwen35MoeModel>();
  PITH_FAIL_HINT("supported: qwen3_moe, deepseek_v2, gpt_oss, qwen3_5_moe",
    "{}: model_type \"{}\" is not supported", path, family);
}

// A whole model in one process: what generate and trace share.
struct ModelOptions {
  string folder, dtype = "auto", device = "auto";
  void add_to(CLI::App& command) {
    command.add_option("folder", folder, "Hugging Face folder or checkpoint")->required();
    command.add_option("--dtype", dtype, "fp32, bf16, or auto: fp32 on CPUs, bf16 on GPUs")
      ->check(CLI::IsMember({"auto", "fp32", "bf16"}))
      ->capture_default_str();
    command.add_option("--device", device, "auto, cpu, cuda")->capture_default_str();
  }
};

template <class Model> struct LoadedModel {
  LoadedModel(const ModelOptions& options, ShardGroup::Use use)
      : device(select_device(options.device)), config(Model::Config::parse_file(options.folder)),
        model(config, whole_model(config.num_layers, config.num_experts)) {
    mesh.device = device;
    const bool bf16 = options.dtype == "bf16" || (options.dtype == "auto" && device.is_cuda());
    groups = make_shard_groups(model.parameter_units(), bf16 ? kBFloat16 : kFloat, mesh, use);
    restore_weights(groups, options.folder, config.tie_embeddings);
  }
  Device device;
  typename Model::Config config;
  Model model;
  Mesh mesh;
  vector<ShardGroup> groups;
};
}
