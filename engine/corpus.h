// Megatron-format corpora: memory-mapped reading, streaming writing that can go on later.
#pragma once
#include "engine/file_io.h"

namespace pith {
// A view of the bytes of PREFIX.idx: "MMIDIDX\0\0", version 1 (u64), dtype code (u8), sequence
// count (u64), document count + 1 (u64), int32 lengths, int64 byte pointers, int64 document indices
// (first sequence of each, then the sequence count). Checked: documents are contiguous ranges of
// tokens, in order, that fill bin_bytes exactly.
struct CorpusIndex {
  int64_t width = 0; // bytes of an id: 2 (uint16, code 8) or 4 (int32, code 4)
  int64_t num_sequences = 0, num_documents = 0, num_tokens = 0;
  int64_t begin(int64_t document) const { // first token; begin(num_documents) is num_tokens
    const int64_t sequence = load<int64_t>(documents, document);
    return sequence == num_sequences ? num_tokens : load<int64_t>(pointers, sequence) / width;
  }
  const char *lengths = nullptr, *pointers = nullptr, *documents = nullptr; // unaligned arrays
};
CorpusIndex parse_corpus_index(string_view bytes, uint64_t bin_bytes, const string& source);

// PREFIX.idx and PREFIX.bin, the ids; tokenizer hash, vocabulary, counts and checksums stand in
// PREFIX.json, which corpora of other programs lack. Opening checks all but the ids. PREFIX may
// also name shards, PREFIX-00000-of-0000N.*, joined in order.
class Corpus {
 public:
  explicit Corpus(const string& prefix);
  const string& prefix() const { return prefix_; }
  int64_t num_documents() const { return begins_.back(); }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t vocab_size() const { return shards_[0].vocab_size; } // 0 without a side file
  const string& tokenizer_hash() const { return shards_[0].tokenizer_hash; } // or ""
  string fingerprint() const; // hash of index, size and side file
  string dtype() const { return shards_[0].index.width == 2 ? "uint16" : "int32"; }
  int64_t length(int64_t document) const {
    const CorpusIndex& index = locate(document).index;
    return index.begin(document + 1) - index.begin(document);
  }
  // Copies tokens [begin, begin + out.size()) of a document. An id outside the vocabulary (without
  // a side file: a negative one) is an Error naming document and place.
  void read(int64_t document, int64_t begin, span<int64_t> out) const;
  vector<int32_t> ids(int64_t document) const; // all of a document
 private:
  friend vector<string> verify_corpus(const string& prefix);
  struct Shard {
    explicit Shard(string path);
    void verify(vector<string>& problems) const;
    string prefix, tokenizer_hash, facts; // facts: what the fingerprint is of
    int64_t vocab_size = 0;
    MappedFile index_file, bin;
    CorpusIndex index;
  };
  // The shard that holds a document, whose number becomes that in the shard.
  const Shard& locate(int64_t& document) const;

  string prefix_;
  vector<Shard> shards_;
  vector<int64_t> begins_; // first document of each shard, and their number
  int64_t num_tokens_ = 0;
};

// PREFIX itself or its shards; none where there is nothing.
vector<string> corpus_shards(const string& prefix);

// The problems of a corpus: checksums, borders, ids outside the vocabulary.
vector<string> verify_corpus(const string& prefix);

// What a CorpusWriter has written: shards that are full, then documents and tokens of the last one.
struct CorpusProgress {
  int64_t shard = 0, documents = 0, tokens = 0;
};

// Appends documents under temporary names, renamed in finish(). Ids are checked, and uint16 for a
// vocabulary up to 65,536, else int32. Memory does not grow with the corpus.
class CorpusWriter {
 public:
  // With shard_tokens > 0 a shard ends before the document that would make it longer. `resume` goes
  // on behind what sync() once returned; without it the temporary files go unless it is finished.
  CorpusWriter(string prefix, int64_t vocab_size, string tokenizer_hash, int64_t shard_tokens = 0,
    const CorpusProgress* resume = nullptr);
  ~CorpusWriter();
  void add_document(span<const int32_t> ids);
  CorpusProgress sync(); // makes everything durable, to go on from there
  int64_t close(); // no more documents; returns what publish_corpus wants
  void finish(); // close and publish
  void discard() { wanted_ = false; } // what was written is removed in the end
 private:
  void open_shard();
  void close_shard();
  string base() const; // of the names of the open shard's files
  string prefix_, tokenizer_hash_;
  int64_t vocab_size_, width_, shard_tokens_;
  bool wanted_;
  CorpusProgress at_;
  // The open shard. Its index and side file are made of these when it is full.
  optional<OutputFile> bin_, lengths_;
};

// Renames what close() left to the final names and removes an older corpus there, also when it was
// interrupted. `shards` is 0 for a corpus that is not cut.
void publish_corpus(const string& prefix, int64_t shards);
}
