// The safetensors format: memory-mapped reading that trusts nothing, and writing.
#pragma once
#include "core/tensor.h"
#include "engine/file_io.h"

namespace pith {
struct TensorEntry {
  ScalarType dtype;
  vector<int64_t> shape;
  uint64_t begin, end; // bytes in the data section
};

// The header as the format defines it: 8 bytes length, JSON, data. An Error names `source` and the
// tensor for every violation. Allocates a multiple of the bytes given, whatever they say.
struct SafetensorsHeader {
  map<string, TensorEntry> tensors;
  map<string, string> metadata;
  uint64_t data_offset = 0; // in the file
};
SafetensorsHeader parse_safetensors_header(
  string_view head, uint64_t file_size, const string& source);

// A memory-mapped file; the mapping lives as long as any of its tensors.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const fs::path& path);
  const SafetensorsHeader& header() const { return header_; }
  const fs::path& path() const { return path_; }
  string_view bytes(const string& name) const; // of one tensor, as stored
  // CPU; do not write to it. No copy, unless the data are not aligned to the dtype in this file.
  Tensor tensor(const string& name) const;
 private:
  fs::path path_;
  MappedFile file_;
  SafetensorsHeader header_;
};

using NamedTensor = pair<string, Tensor>;

// Writes CPU tensors in the order given with metadata {"format": "pt"}, durably; the same tensors
// give the same bytes. At most one tensor is copied at a time.
WrittenFile write_safetensors(const fs::path& path, const vector<NamedTensor>& tensors);
}
