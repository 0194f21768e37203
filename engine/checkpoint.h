// Checkpoints: a Hugging Face model folder plus optimizer shards and manifest; atomic, checksummed.
#pragma once
#include "core/comm.h"
#include "engine/hf_folder.h"
#include "engine/sharding.h"

namespace pith {

// Name of elements [offset, offset + length) of one flattened Hugging Face tensor of `total`
// elements in an optimizer shard: "KIND/TENSOR@OFFSET/TOTAL". Kinds: master, exp_avg, exp_avg_sq.
std::string state_key(
    const std::string& kind, const std::string& tensor, int64_t offset, int64_t total);

// What this rank writes of one save, on the host, owned by it; the last two on rank 0 only.
struct CheckpointContent {
  int64_t step = 0;
  std::vector<NamedTensor> weights;    // Hugging Face names and shapes, compute dtype
  std::vector<NamedTensor> optimizer;  // by state_key; flat, CPU, float32
  std::vector<std::pair<std::string, std::string>> files;  // config.json, ...: name, bytes
  std::string training_state;                              // JSON
};

// step-00000020/
//   config.json, generation_config.json, tokenizer files ...        as given in `files`
//   model-00001-of-00002.safetensors ..., model.safetensors.index.json
//   optimizer/shard-00000-of-00001.safetensors ...  by state_key
//   training_state.json
//   manifest.json                                   written last
//
// Written under a temporary name, fsynced, manifest.json last (size and xxh3 of every file), then
// renamed; a checkpoint of the same step is replaced in one rename. Older complete ones beyond
// keep_last (0 = all) are deleted only then, and leftovers of killed saves. Whatever fails: an
// Error names path and cause, the temporary folder is gone, the other checkpoints are untouched.
//
// One save at a time in the background, by all ranks of `world` into one folder that they share;
// start is collective, its thread is not: each rank leaves the list of its files in .done-RANK, and
// rank 0's thread waits for all of them (10 minutes after its own files). So finish() of rank 0
// means durable, of another rank that its own files are written. An error of the thread is thrown
// by the next start or finish, on the rank concerned and on rank 0; the destructor prints it.
class CheckpointWriter {
 public:
  ~CheckpointWriter();
  void start(std::filesystem::path root, CheckpointContent content, int64_t keep_last,
      const Comm& world = {});
  void finish() {  // waits
    if (saving_.valid()) saving_.get();
  }
 private:
  std::future<void> saving_;
};

// manifest.json, which carries its own checksum.
struct Manifest {
  int64_t step = 0;
  std::map<std::string, WrittenFile> files;  // by path relative to the checkpoint
};
Manifest parse_manifest(std::string_view text, const std::string& source);
Manifest read_manifest(const std::filesystem::path& checkpoint);

// Newest complete checkpoint (every file there with its size), if any; `skipped`: newer ones, why.
std::optional<std::filesystem::path> newest_checkpoint(
    const std::filesystem::path& root, std::vector<std::string>* skipped = nullptr);

// Compares size and xxh3 of every file with the manifest; returns the problems (empty = sound),
// each naming the file and, where it can be told, the tensor.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& folder);

// verify_checkpoint as an Error: call it before anything of a checkpoint is used.
void check_checkpoint(const std::filesystem::path& folder);

// Optimizer state by (kind, Hugging Face name), assembled from the slices of however many shards;
// checks that every tensor is covered exactly once. Memory-mapped.
class OptimizerReader {
 public:
  explicit OptimizerReader(const std::filesystem::path& folder);
  // Copies elements [first, first + out.numel()) of one tensor's state into `out` (flat, any
  // device), reading those only. Throws naming tensor and file.
  void read(const std::string& kind, const HfTensor& tensor, Tensor out, int64_t first = 0) const;
 private:
  struct Piece {
    size_t file;
    std::string key;
    int64_t offset, count, total;
  };
  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::pair<std::string, std::string>, std::vector<Piece>> pieces_;
};

// The small part of what a run is at a moment, kept as training_state.json.
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
  // "\n  training.steps: 20 in the checkpoint, 40 now" for each setting of the rate that differs.
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

// The first parameter, in forward order, with a NaN or Inf in this rank's part of the weights
// ("weight NAME") or of the gradient ("gradient of NAME"), or "".
std::string first_non_finite(std::span<ShardGroup> groups);

}  // namespace pith
