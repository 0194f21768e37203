// Checkpoints: a Hugging Face model folder plus optimizer shards and a manifest; atomic and
// checksummed.
#pragma once
#include <exception>
#include <filesystem>
#include <optional>
#include <thread>

#include "core/comm.h"
#include "engine/hf_folder.h"

namespace pith {

// A contiguous range of one Hugging Face tensor's optimizer state; whole tensors have offset 0.
struct StateSlice {
  std::string kind;    // "master", "exp_avg", "exp_avg_sq"
  std::string tensor;  // Hugging Face name
  int64_t offset;      // first element, in the flattened tensor
  int64_t total;       // elements of the whole tensor
  Tensor data;         // flat, CPU, float32
};

// What this rank writes of one save, on the host, owned by it (the trainer goes on while it is
// written). `files` and `training_state` count on rank 0 only.
struct CheckpointContent {
  int64_t step = 0;
  std::vector<NamedTensor> weights;  // Hugging Face names and shapes, compute dtype
  std::vector<StateSlice> optimizer;
  std::vector<std::pair<std::string, std::string>> files;  // config.json, ...: name, bytes
  std::string training_state;                              // JSON
};

// step-00000020/
//   config.json, generation_config.json, tokenizer files ...        as given in `files`
//   model-00001-of-00002.safetensors ..., model.safetensors.index.json
//   optimizer/shard-00000-of-00001.safetensors ...  flat float32 "KIND/TENSOR@OFFSET/TOTAL", count
//                                                   = its length
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
  CheckpointWriter() = default;
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  ~CheckpointWriter();
  void start(std::filesystem::path root, CheckpointContent content, int64_t keep_last,
      const Comm& world = {});
  void finish();  // waits
 private:
  std::thread thread_;
  std::exception_ptr error_;
};

// What manifest.json says. It carries its own checksum.
struct Manifest {
  int64_t step = 0;
  std::map<std::string, WrittenFile> files;  // by path relative to the checkpoint
};
Manifest parse_manifest(std::string_view text, const std::string& source);
Manifest read_manifest(const std::filesystem::path& checkpoint);

// Newest complete checkpoint under root (manifest readable, every file there with its size), or
// nothing. Others are reported in `skipped` with the reason.
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

}  // namespace pith
