#include "apps/families.h"

#include <nlohmann/json.hpp>

namespace pith {

std::string read_model_type(const fs::path& path) {
  const auto file = fs::is_directory(path) ? path / "config.json" : path;
  const nlohmann::json config = read_json(file);
  const auto type = config.is_object() ? config.value("model_type", nlohmann::json()) : config;
  PITH_CHECK(
      type.is_string(), "{} has no \"model_type\": it is not a model configuration", file.string());
  return type.get<std::string>();
}

void ModelOptions::add_to(CLI::App& command) {
  command.add_option("folder", folder, "Hugging Face folder or checkpoint")->required();
  command.add_option("--dtype", dtype, "fp32, bf16, or auto: fp32 on CPUs, bf16 on GPUs")
      ->check(CLI::IsMember({"auto", "fp32", "bf16"}))
      ->capture_default_str();
  command.add_option("--device", device, "auto, cpu, cuda")->capture_default_str();
}

}  // namespace pith
