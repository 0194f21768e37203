// The one switch from model_type to a model family, and the loading of a whole model.
#pragma once
#include "apps/commands.h"
#include "engine/checkpoint.h"
#include "models/deepseek_v2.h"
#include "models/qwen3_moe.h"

namespace pith {

// The model_type of a config.json, or of the one in a folder.
std::string read_model_type(const fs::path& path);

// Calls use.operator()<Model>() with the family that the model_type of a config.json names. `path`:
// the file or its folder.
template <class Use>
auto with_family(const fs::path& path, Use&& use) {
  const std::string family = read_model_type(path);
  if (family == "qwen3_moe") return use.template operator()<Qwen3MoeModel>();
  if (family == "deepseek_v2") return use.template operator()<DeepseekV2Model>();
  PITH_FAIL_HINT("supported: qwen3_moe, deepseek_v2", "{}: model_type \"{}\" is not supported",
      path.string(), family);
}

// Options of the commands that run a whole model in one process.
struct ModelOptions {
  std::string folder, dtype = "auto", device = "auto";
  void add_to(CLI::App& command);
  Mesh mesh() const;  // of this process, on the device
  at::ScalarType dtype_on(at::Device device) const;
};

template <class Model>
struct LoadedModel {
  LoadedModel(const ModelOptions& options, ShardGroup::Use use)
      : mesh(options.mesh()),
        config(Model::Config::parse_file(options.folder)),
        model(config, whole_model(config.num_layers, config.num_experts)),
        groups(
            make_shard_groups(model.parameter_units(), options.dtype_on(mesh.device), mesh, use)) {
    restore_weights(groups, options.folder, config.tie_embeddings);
  }
  Mesh mesh;
  typename Model::Config config;
  Model model;
  std::vector<ShardGroup> groups;
};

}  // namespace pith
