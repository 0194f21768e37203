// Hugging Face model folders: finding tensors over shards, importing them into parameters, writing
// them.
#pragma once
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <span>

#include "core/parameter.h"
#include "engine/safetensors.h"

namespace pith {

// model.safetensors, or model.safetensors.index.json with its shards. Opening checks index and
// shards against each other (each entry in the file named and in no other, nothing missing) and
// lists every problem at once.
class HfFolder {
 public:
  explicit HfFolder(const std::filesystem::path& folder);
  std::vector<std::string> names() const;
  bool has(const std::string& name) const;
  const TensorEntry& entry(const std::string& name) const;
  Tensor tensor(const std::string& name) const;  // memory-mapped view
  const std::filesystem::path& path() const { return path_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }

 private:
  const SafetensorsFile& file_of(const std::string& name) const;
  std::filesystem::path path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> file_of_;
};

// JSON of a file, or of text that came from `source`, with errors that name file, line and column.
// A key that stands twice in one object is an error too: readers disagree about which one counts.
nlohmann::json read_json(const std::filesystem::path& path);
nlohmann::json parse_json(std::string_view text, const std::string& source);

// Names that differ only in numbers as one line each: "layers.{0-47}.experts.{0-127}.up_proj
// (6144)". Exact: a line with ranges stands for every combination in them; what does not combine is
// listed one by one.
std::vector<std::string> summarize_names(const std::vector<std::string>& names);

// Copies every Hugging Face tensor of `parameters` from the folder into `targets[i]` (flat, numel
// of parameters[i], any float dtype and device; converting). Tensors missing, left over, or of
// another shape or a non-float dtype are collected into one Error. `optional_extra`: names that may
// be left over.
void import_weights(const HfFolder& folder, std::span<Parameter* const> parameters,
                    std::span<Tensor> targets, std::span<const std::string> optional_extra = {});

// Writes model-0000i-of-0000n.safetensors of at most shard_bytes each and
// model.safetensors.index.json (total_size, weight_map); a single file is still written with an
// index. Returns what was written, index last.
std::vector<WrittenFile> write_hf_weights(const std::filesystem::path& folder,
                                          const std::vector<NamedTensor>& weights,
                                          uint64_t shard_bytes = 5'000'000'000);

}  // namespace pith
