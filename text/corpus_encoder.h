// Files to token ids: many workers, documents in the order of the files.
#pragma once
#include <array>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <optional>
#include <thread>

#include "text/corpus_reader.h"
#include "text/tokenizer.h"

namespace pith {

struct EncodeSettings {
  ReadOptions read;
  uint64_t min_length = 0, max_length = UINT64_MAX;  // bytes of a document's text
  std::optional<int32_t> end_id;                     // put behind each document
  int workers = 1;
  uint64_t bytes_in_flight = uint64_t{32} << 20;  // of text read and not handed out
};

struct EncodedDocument : Document {  // without its text
  enum class Kind { kGood, kBad, kNotText, kEmpty, kShort, kLong } kind = Kind::kGood;
  uint64_t bytes = 0;                     // of text
  uint64_t hash = 0;                      // xxh3-64 of the text
  std::array<uint64_t, 2> fingerprint{};  // xxh3-128 of the text
  std::vector<int32_t> ids;
};

struct EncodedChunk : ChunkPlace {
  std::vector<EncodedDocument> documents;
  int64_t dropped_characters = 0;  // that the tokenizer has no token for
};

class CorpusEncoder {
 public:
  CorpusEncoder(std::vector<InputFile> files, Tokenizer tokenizer, EncodeSettings settings,
      InputPosition start);
  ~CorpusEncoder();  // ends the threads
  // The next chunk in the order of the files, whatever the number of workers; false at the end. An
  // Error of the reader comes after all chunks before it.
  bool next(EncodedChunk& chunk);
 private:
  struct Slot {
    std::future<EncodedChunk> encoded;
    uint64_t bytes;  // of its text
  };
  void work();
  EncodedChunk encode(Chunk chunk) const;

  InputReader reader_;
  Tokenizer tokenizer_;
  EncodeSettings settings_;
  std::mutex reading_;  // a worker's turn: it reads a chunk and puts a slot for it in line
  std::mutex mutex_;    // of what follows
  std::condition_variable changed_;
  std::deque<Slot> slots_;  // in the order of the files
  uint64_t in_flight_ = 0;
  bool ended_ = false;
  std::vector<std::jthread> threads_;  // the last member: the first to go
};

}  // namespace pith
