// Not a test: a job that loads a checkpoint of the program on some layout and saves it again
// without a step; see tests/integration/reshard.sh.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include "engine/checkpoint.h"
#include "engine/file_io.h"
#include "engine/pipeline.h"
#include "models/gpt_oss.h"
#include "models/qwen3_5_moe.h"
#include "models/qwen3_moe.h"
#include "tests/parallel/world.h"

namespace pith::test {

template <class Model> void save_again_as(
  const std::filesystem::path& from, const std::filesystem::path& root, const MeshShape& shape) {
  const Mesh mesh = make_mesh(shape, world(), device());
  const auto config = Model::Config::parse_file(from);
  const auto chunks = default_chunks(config, shape, config.max_positions);
  Model model(config, model_part(chunks, shape, mesh.place, config));
  auto groups =
    make_shard_groups(model.parameter_units(), at::kFloat, mesh, ShardGroup::Use::training);
  restore_state(groups, from);
  CheckpointContent content;
  content.step = read_manifest(from).step;
  content.training_state = read_file(from / "training_state.json");
  for (const char* name: {"config.json", "generation_config.json", "run.toml"})
    content.files.emplace_back(name, read_file(from / name));
  collect_state(groups, content, mesh.expert);
  CheckpointWriter writer;
  writer.start(root, std::move(content), 0, mesh.world);
  writer.finish();
  mesh.world.barrier();
}

// "FROM ROOT PP CP EP HEAD_SHARE": the float32 checkpoint FROM becomes ROOT/step-....
void save_again(const std::string& what) {
  std::istringstream words(what);
  std::filesystem::path from, root;
  MeshShape shape;
  words >> from >> root >> shape.pp >> shape.cp >> shape.ep >> shape.head_share;
  PITH_CHECK(!words.fail(), "'{}' is not FROM ROOT PP CP EP HEAD_SHARE", what);
  const nlohmann::json family = read_json(from / "config.json")["model_type"];
  if (family == "gpt_oss") save_again_as<GptOssModel>(from, root, shape);
  else if (family == "qwen3_5_moe") save_again_as<Qwen35MoeModel>(from, root, shape);
  else save_again_as<Qwen3MoeModel>(from, root, shape);
}

} // namespace pith::test
