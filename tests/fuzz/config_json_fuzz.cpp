// config.json of a model folder: JSON, then the fields of Qwen3-MoE.
#include <nlohmann/json.hpp>

#include "engine/hf_folder.h"
#include "models/qwen3_moe.h"
#include "tests/fuzz/fuzz.h"

PITH_FUZZ(text) { pith::Qwen3MoeConfig::parse(pith::parse_json(text, "fuzz"), "fuzz"); }
