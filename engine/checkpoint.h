// Checkpoints: a Hugging Face model folder plus optimizer shards and manifest; atomic, checksummed.
#pragma once
#include "core/comm.h"
#include "engine/hf_folder.h"
#include "engine/sharding.h"

namespace pith {
// Name of a slice of one flattened Hugging Face tensor of `total` elements in an optimizer shard:
// "KIND/TENSOR@OFFSET/TOTAL". Kinds: master, exp_avg, exp_avg_sq, momentum (Muon), ema.
string state_key(const string& kind, const string& tensor, int64_t offset, int64_t total);

// What this rank writes of one save, on the host; the last two on rank 0 only.
struct CheckpointContent {
  int64_t step = 0;
  vector<NamedTensor> weights; // Hugging Face names and shapes, compute dtype
  vector<NamedTensor> ema; // the same of the moving average
  vector<NamedTensor> optimizer; // by state_key; flat, CPU, float32; moments may be bfloat16
  vector<pair<string, string>> files; // config.json, ...: name, bytes
  string training_state; // JSON
};

// step-00000020/
//   config.json, generation_config.json, tokenizer files ...        as given in `files`
//   model-00001-of-00002.safetensors ..., model.safetensors.index.json
//   ema/                     the moving average: a model folder of its own, with the same files
//   optimizer/shard-00000.safetensors ...           by state_key, one a rank
//   training_state.json
//   manifest.json            written last: size and xxh3 of every file, and its own checksum
//
// Written under a temporary name, fsynced, then renamed. Only then older complete ones beyond
// keep_last (0 = all) and leftovers of killed saves go. Whatever fails: an Error names path and
// cause, the temporary folder is gone, the other checkpoints are untouched.
//
// One save at a time in the background, by all ranks of `world` into one shared folder. start is
// collective, its thread is not: each rank leaves the list of its files in .done-RANK, for which
// rank 0's thread waits (10 minutes). So finish() of rank 0 means durable. An error of the thread
// is thrown by the next start or finish, there and on rank 0; the destructor prints it.
class CheckpointWriter {
 public:
  ~CheckpointWriter();
  void start(fs::path root, CheckpointContent content, int64_t keep_last, const Comm& world = {});
  void finish() { // waits
    if (saving_.valid()) saving_.get();
  }
 private:
  std::future<void> saving_;
};

struct Manifest {
  int64_t step = 0;
  map<string, WrittenFile> files; // by path relative to the checkpoint
};
Manifest parse_manifest(string_view text, const string& source);
Manifest read_manifest(const fs::path& checkpoint);

// Newest complete checkpoint (every file there with its size), if any; `skipped`: newer ones, why.
optional<fs::path> newest_checkpoint(const fs::path& root, vector<string>* skipped = nullptr);

// What differs from the manifest's sizes and sums (empty = sound): file and, if it can be told,
// tensor.
vector<string> verify_checkpoint(const fs::path& folder);

// verify_checkpoint as an Error: call it before anything of a checkpoint is used.
void check_checkpoint(const fs::path& folder);

// Optimizer state by (kind, Hugging Face name), from the slices of however many shards.
class OptimizerReader {
 public:
  explicit OptimizerReader(const fs::path& folder);
  // Copies elements [first, first + out.numel()) of a tensor's state into `out` (flat, any
  // device). An Error names tensor and folder unless each is there once, in the dtype of `out`.
  void read(const string& kind, const HfTensor& tensor, Tensor out, int64_t first = 0) const;
 private:
  struct Piece {
    size_t file;
    string key;
    int64_t offset, count, total;
  };
  fs::path folder_;
  vector<SafetensorsFile> files_;
  map<string, vector<Piece>> pieces_; // by "KIND/TENSOR"
};

// training_state.json.
struct TrainingState {
  using Settings = map<string, string>;
  int64_t step = 0;
  int64_t updates = 0; // of the weights: steps that were not skipped
  int64_t skipped_in_row = 0; // the last steps
  int64_t rows_read = 0; // the data cursor: rows of the blend consumed
  int64_t tokens_seen = 0;
  Settings data; // what the cursor counts in; a difference on resume is refused
  Settings schedule; // schedule_settings; a difference has to be allowed

  string to_json() const;
  static TrainingState from_json(const string& text, const string& source);
  // "\n  training.steps: 20 in the checkpoint, 40 now" for each setting that differs.
  static string differences(const Settings& saved, const Settings& now);
};

// Host copies of what this rank writes: its parts of masters, moments and averages (replica 0
// only), and whole weights and averages of the units that are its turn in the shard group, tensors
// of all experts by turns in `expert`. Collective.
void collect_state(span<ShardGroup> groups, CheckpointContent& content, const Comm& expert = {});

// Masters, moments, averages and weights from a checkpoint's optimizer shards, whatever layout
// wrote them. An Error where a tensor had another optimizer or dtype. Collective.
void restore_state(span<ShardGroup> groups, const fs::path& checkpoint);

// Weights from any Hugging Face folder. `tied_head`: a stored lm_head.weight is allowed.
// `whole_model`: parameter_units() of it, where other ranks hold parts. Collective.
void restore_weights(span<ShardGroup> groups, const fs::path& folder, bool tied_head,
  const vector<vector<Parameter*>>& whole_model = {});

// The first parameter with a NaN or Inf in this rank's part: "weight NAME", "gradient of NAME", "".
string first_non_finite(span<ShardGroup> groups);
}
