// Hugging Face model folders: tensors found over shards, imported into parameters, written.
#pragma once
#include "core/parameter.h"
#include "engine/safetensors.h"

namespace pith {
// model.safetensors, or model.safetensors.index.json with its shards. Opening checks index and
// shards against each other, both ways, and lists every problem at once.
class HfFolder {
 public:
  explicit HfFolder(const fs::path& folder);
  vector<string> names() const;
  const SafetensorsFile* file_of(const string& name) const { // null: there is no such tensor
    const auto found = file_of_.find(name);
    return found == file_of_.end() ? nullptr : &files_[found->second];
  }
  Tensor tensor(const string& name) const; // memory-mapped view
  const fs::path& path() const { return path_; }
  const vector<SafetensorsFile>& files() const { return files_; }
 private:
  fs::path path_;
  vector<SafetensorsFile> files_;
  map<string, size_t> file_of_;
};

// More than three names that differ only in numbers become one line:
// "layers.0.experts.0.up_proj to layers.47.experts.127.up_proj (6144)".
vector<string> summarize_names(vector<string> names);

// Where elements [first, first + target.numel()) of a tensor go: flat, any float dtype.
struct ImportTarget {
  const HfTensor* tensor;
  int64_t first;
  Tensor target;
};

// MXFP4 (OCP Microscaling Formats 1.0): blocks (N, G, 16), two 4-bit floats a byte, the low bits
// first; scales (N, G), powers of two of which 127 is 1 and 255 NaN -> (N, 32 G) float32, exact.
Tensor dequantize_mxfp4(const Tensor& blocks, const Tensor& scales);

// Copies ranges from the folder into the targets, converting. A tensor (E, K, N) may lie there in
// MXFP4: NAME_blocks (E, N, K / 32, 16), NAME_scales (E, N, K / 32). One Error lists all tensors
// missing, left over (but not in `optional_extra`), of another shape or dtype; those of vision and
// MTP parts are listed and left out.
void import_weights(
  const HfFolder& folder, span<const ImportTarget> targets, span<const string> optional_extra = {});
// One of these, of which the folder is known to hold the tensor.
void import_tensor(const HfFolder& folder, const ImportTarget& to);

// The steps of writing a folder, perhaps by several: each writes its tensors, in order, into files
// of at most file_bytes or one tensor; then one names all of them, in the order of `files`,
// model-0000i-of-0000n.safetensors and writes the index. `inside`: "ema/", in the folder.
vector<WrittenFile> write_weights(const fs::path& folder, int64_t writer,
  const vector<NamedTensor>& weights, uint64_t file_bytes = 5'000'000'000);
WrittenFile write_weight_index(
  const fs::path& folder, span<WrittenFile> files, const string& inside = "");
}
