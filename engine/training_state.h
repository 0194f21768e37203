// What a training run is at a moment: counters, weights and optimizer state, on their way to and
// from a checkpoint.
#pragma once
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint.h"
#include "engine/sharding.h"

namespace pith {

// The small part, kept as training_state.json.
struct TrainingState {
  // A corpus of data.train. Paths may change; the rest may not.
  struct Source {
    std::string path, fingerprint, tokenizer_hash;
    int64_t weight = 1;  // Blend::weights
  };
  int64_t step = 0;       // updates done
  int64_t rows_read = 0;  // the data cursor: rows of the blend consumed
  int64_t tokens_seen = 0;
  // What the cursor counts in; a difference on resume is refused by name.
  std::vector<Source> sources;
  int64_t sequence_length = 0;
  uint64_t data_seed = 0;
  bool document_mask = true;
  std::string packing = "concat";
  std::map<std::string, std::string> schedule;  // schedule_settings

  std::string to_json() const;
  static TrainingState from_json(const std::string& text, const std::string& source);
  // Throws unless this state's cursor means the same rows under `other`'s data settings.
  void check_same_data(const TrainingState& other, const std::string& source) const;
  // "\n  training.steps: 20 in the checkpoint, 40 now" for each setting of the learning rate that
  // differs; empty where none does.
  std::string schedule_differences(const TrainingState& other) const;
};

// Host copies of what this rank writes of these groups: its parts of masters and moments (replica 0
// only), 12 bytes an element, and, of every unit, the whole weights on one member of the shard
// group, by turns; tensors of all experts on one member of `expert`, by turns. Collective.
void collect_state(
    std::span<ShardGroup> groups, CheckpointContent& content, const Comm& expert = {});

// Masters, moments and (through publish) weights from a checkpoint's optimizer shards, whatever
// layout wrote them; each rank reads its ranges. Collective.
void restore_state(std::span<ShardGroup> groups, const std::filesystem::path& checkpoint);

// Weights only, from any Hugging Face folder; moments start at zero. `tied_head`: a stored
// lm_head.weight is allowed. `whole_model`: parameter_units() of the whole model, where other ranks
// hold parts of it. Collective.
void restore_weights(std::span<ShardGroup> groups, const std::filesystem::path& folder,
    bool tied_head, const std::vector<std::vector<Parameter*>>& whole_model = {});

// The first parameter, in forward order, that holds a NaN or Inf in this rank's part of the weights
// ("weight NAME") or of the gradient ("gradient of NAME"), or "".
std::string first_non_finite(std::span<ShardGroup> groups);

}  // namespace pith
