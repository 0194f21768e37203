// Megatron-format corpora: memory-mapped reading, streaming writing.
#pragma once
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace pith {

// PREFIX.idx: "MMIDIDX\0\0", version 1 (u64), dtype code (u8), sequence count (u64), document count
// + 1 (u64), int32 lengths, int64 byte pointers, int64 document indices (first sequence of each
// document, then the sequence count). PREFIX.bin: the ids. PREFIX.json: tokenizer hash, vocabulary,
// counts and checksums; corpora without it (of other programs) are read as well. Opening checks all
// but the ids. A corpus may be cut into shards PREFIX-00000-of-0000N.*, each a corpus of its own;
// PREFIX then names all of them, joined in order, and a missing one is an Error.
class Corpus {
 public:
  explicit Corpus(const std::string& prefix);
  int64_t num_documents() const;
  int64_t num_tokens() const;
  int64_t length(int64_t document) const;
  // Copies tokens [begin, begin + out.size()) of a document, widened to int64. An id outside the
  // vocabulary is an Error naming document and place.
  void read(int64_t document, int64_t begin, std::span<int64_t> out) const;
  int64_t vocab_size() const;          // from the side file; 0 where there is none
  std::string tokenizer_hash() const;  // from the side file; "" where there is none
  std::string fingerprint() const;     // of index, size and side file: changes with the corpus
  std::string dtype() const;           // of an id in PREFIX.bin: "uint16", ...
  const std::string& prefix() const;
  std::vector<std::string> shards() const;  // their prefixes; one for a corpus that is not cut

 private:
  friend std::vector<std::string> verify_corpus(const std::string& prefix);
  struct Shard;
  struct State;
  std::shared_ptr<const State> state_;
};

// What a CorpusWriter has written: shards that are full, then documents and tokens of the last one.
struct CorpusProgress {
  int64_t shard = 0, documents = 0, tokens = 0;
};

// Appends documents under temporary names and renames at the end, so a killed build leaves nothing
// that looks whole. Ids are uint16 for a vocabulary up to 65,536, else int32, and checked. Memory
// does not grow with the corpus. Not finished means not wanted: the temporary files are removed,
// unless sync() was called.
class CorpusWriter {
 public:
  // With shard_tokens > 0 a shard ends before the document that would make it longer. `resume`
  // goes on behind what sync() once returned; what was written later is cut off.
  CorpusWriter(std::string prefix, int64_t vocab_size, std::string tokenizer_hash,
      int64_t shard_tokens = 0, const CorpusProgress* resume = nullptr);
  void add_document(std::span<const int32_t> ids);
  CorpusProgress sync();  // makes everything durable, to go on from there after a crash
  int64_t close();        // no more documents; returns what publish_corpus wants
  void finish();          // close and publish
  void discard();         // removes what was written

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Renames what CorpusWriter::close() left to the final names and removes an older corpus there.
// shards is 0 for a corpus that is not cut. May be repeated: one that was interrupted is completed.
void publish_corpus(const std::string& prefix, int64_t shards);

// All checks of a corpus (checksums of the side file, borders, ids below the vocabulary); problems,
// or empty. Damage in PREFIX.bin is told by the documents of the damaged block.
std::vector<std::string> verify_corpus(const std::string& prefix);

// A view of an index file's bytes, which must outlive it. Checked: each document is a contiguous
// range of tokens, ranges are in order and fill bin_bytes exactly.
struct CorpusIndex {
  int dtype_code = 0;
  int64_t width = 0;  // bytes of an id
  int64_t num_sequences = 0, num_documents = 0, num_tokens = 0;
  int64_t begin(int64_t document) const;  // first token; begin(num_documents) is num_tokens

  const char *lengths = nullptr, *pointers = nullptr, *documents = nullptr;  // unaligned arrays
};
CorpusIndex parse_corpus_index(
    std::string_view bytes, uint64_t bin_bytes, const std::string& source);

}  // namespace pith
