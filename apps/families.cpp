#include "apps/families.h"

#include <nlohmann/json.hpp>

namespace pith {

std::string read_model_type(const std::filesystem::path& path) {
  const auto file = std::filesystem::is_directory(path) ? path / "config.json" : path;
  const nlohmann::json config = read_json(file);
  PITH_CHECK(
      config.is_object() && config.contains("model_type") && config["model_type"].is_string(),
      "{} has no \"model_type\": it is not a model configuration", file.string());
  return config["model_type"].get<std::string>();
}

}  // namespace pith
