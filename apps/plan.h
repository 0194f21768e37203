// What a run is, and will need, from its configuration alone.
#pragma once
#include "apps/families.h"
#include "engine/config.h"
#include "engine/pipeline.h"

namespace pith {
inline ScalarType compute_dtype(const RunConfig& config) {
  return config.model.dtype == "float32" ? kFloat : kBFloat16;
}

inline MeshShape mesh_shape(const RunConfig::Parallel& parallel) {
  return {parallel.pp, parallel.cp, parallel.ep, parallel.sharding == "hsdp", parallel.hsdp_size,
    parallel.head_share};
}

// The model of a run: model.config, cut.
template <class Config> Config planned_model(const RunConfig& config) {
  auto model = Config::parse_file(config.model.config);
  if (config.model.num_layers > 0) model.cut_layers(config.model.num_layers);
  PITH_CHECK(config.data.sequence_length <= model.max_positions,
    "data.sequence_length {} is longer than the model's max_position_embeddings {}",
    config.data.sequence_length, model.max_positions);
  return model;
}

// Layers of each chunk: parallel.chunks, or balanced by cost.
template <class Config>
vector<int64_t> chunks_of(const RunConfig& config, const Config& model, const MeshShape& shape) {
  const string& text = config.parallel.chunks;
  if (text.empty()) return default_chunks(model, shape, config.data.sequence_length);
  vector<int64_t> chunks;
  bool valid = true;
  for (const string& word: CLI::detail::split(text, ','))
    valid = valid && CLI::detail::lexical_cast(CLI::detail::trim_copy(word), chunks.emplace_back());
  PITH_CHECK(valid && ssize(chunks) == 2 * shape.pp && ranges::min(chunks) >= 0 &&
      reduce(chunks.begin(), chunks.end()) == model.num_layers,
    "parallel.chunks must be {} numbers of layers with the sum {}, it is \"{}\"", 2 * shape.pp,
    model.num_layers, text);
  return chunks;
}

// Does a stage recompute its activations? parallel.recompute: a word for all or for each.
bool recomputes(const RunConfig& config, int64_t stage);
// Micro-batches of a step on each of `dp` data-parallel ranks.
int64_t micro_batches_of(const RunConfig& config, int64_t dp);

// What --dry-run prints: configuration, parameters, layout, memory, schedule.
void print_plan(const RunConfig& config, int64_t processes);
}
