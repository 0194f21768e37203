// Megatron-format corpora: memory-mapped reading, streaming writing.
#pragma once
#include <span>

#include "engine/file_io.h"

namespace pith {

// A view of the bytes of PREFIX.idx, which must outlive it: "MMIDIDX\0\0", version 1 (u64), dtype
// code (u8), sequence count (u64), document count + 1 (u64), int32 lengths, int64 byte pointers,
// int64 document indices (first sequence of each document, then the sequence count). Checked: each
// document is a contiguous range of tokens, ranges are in order and fill bin_bytes exactly.
struct CorpusIndex {
  int dtype_code = 0;
  int64_t width = 0;  // bytes of an id
  int64_t num_sequences = 0, num_documents = 0, num_tokens = 0;
  int64_t begin(int64_t document) const;  // first token; begin(num_documents) is num_tokens

  const char *lengths = nullptr, *pointers = nullptr, *documents = nullptr;  // unaligned arrays
};
CorpusIndex parse_corpus_index(
    std::string_view bytes, uint64_t bin_bytes, const std::string& source);

// PREFIX.idx and PREFIX.bin, the ids. A side file PREFIX.json names tokenizer hash, vocabulary,
// counts and checksums; corpora without one (of other programs) are read as well. Opening checks
// everything but the ids themselves: index (and its sum), borders, size of PREFIX.bin, side file.
class Corpus {
 public:
  explicit Corpus(const std::string& prefix);
  const std::string& prefix() const { return prefix_; }
  int64_t num_documents() const { return index_.num_documents; }
  int64_t num_tokens() const { return index_.num_tokens; }
  // From the side file; 0 and "" where there is none.
  int64_t vocab_size() const { return vocab_size_; }
  const std::string& tokenizer_hash() const { return tokenizer_hash_; }
  // Hash of index, size and side file: changes when the corpus does.
  const std::string& fingerprint() const { return fingerprint_; }
  std::string dtype() const;  // of an id in PREFIX.bin: "uint16", ...
  int64_t length(int64_t document) const;
  // Copies tokens [begin, begin + out.size()) of a document, widened to int64. An id outside the
  // vocabulary (without a side file: a negative one) is an Error naming document and place.
  void read(int64_t document, int64_t begin, std::span<int64_t> out) const;

 private:
  friend std::vector<std::string> verify_corpus(const std::string& prefix);
  std::string prefix_, tokenizer_hash_, fingerprint_;
  int64_t vocab_size_ = 0;
  MappedFile index_file_, bin_;
  CorpusIndex index_;
};

// All checks of a corpus (checksums of the side file, borders, ids below the vocabulary); problems,
// or empty. Damage in PREFIX.bin is told by the documents of the damaged block.
std::vector<std::string> verify_corpus(const std::string& prefix);

// Appends documents; writes to temporary names and renames in finish(), so a killed build leaves
// nothing that looks whole. Width: 16-bit ids for a vocabulary up to 65,536 (uint16), else int32.
// Ids are checked. Not finished means not wanted: the temporary files are removed.
class CorpusWriter {
 public:
  CorpusWriter(std::string prefix, int64_t vocab_size, std::string tokenizer_hash);
  ~CorpusWriter();
  void add_document(std::span<const int32_t> ids);
  void finish();

 private:
  void end_block();
  std::string prefix_, tokenizer_hash_;
  int64_t vocab_size_;
  size_t width_;
  OutputFile bin_;
  std::vector<int32_t> lengths_;
  std::string block_, block_sums_;
};

}  // namespace pith
