// Files to documents to token ids: which files, decompression, JSON, many workers.
#pragma once
#include "text/tokenizer.h"

namespace pith {
struct ReadOptions {
  string text_field = "text"; // of a JSON line or a table; "a.b" is b inside a
  string id_field = ""; // named in reports; "" = none
  uint64_t max_line = 16'000'000; // bytes of a line, or of a file that is one document
};

struct InputFile {
  string path;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;
};

// Files, globs, and the files below folders in the order of their paths' bytes: of these only names
// that end in one of `endings` ("none": without a dot; empty list: all), without those that begin
// with a dot, linked folders (loops), and what is not a file.
vector<InputFile> list_inputs(const vector<string>& paths, const vector<string>& endings);

// Where a document ends: bytes (after decompression) and lines before it, or rows of a table.
struct InputPosition {
  int64_t file = 0;
  uint64_t offset = 0;
  int64_t line = 0;
};

struct Document {
  string text, id;
  int64_t line = 0; // from 1; 0 for a file that is one document
  string problem; // of a bad one: why
  string skipped; // of one that is left out without being bad: what it is, e.g. "empty"
  // Of the others, when CorpusEncoder has taken the text:
  uint64_t bytes = 0; // of text
  uint64_t hash = 0; // xxh3-64 of the text
  array<uint64_t, 2> fingerprint{}; // xxh3-128 of the text
  vector<int32_t> ids;
};

// Neighbouring documents of one file, about 512 kB or one long document.
struct Chunk {
  string path;
  int64_t line = 0; // lines before its first one
  string lines = {}; // of JSON, whole: read_lines makes documents of them
  vector<Document> documents = {};
  InputPosition end = {};
  uint64_t bytes_read = 0; // of all files up to here, as they lie on the disk
  int64_t dropped_characters = 0; // that the tokenizer has no token for
};

// The texts of the next rows of a Parquet file, nothing for null; none at the end.
using TableRows = function<vector<optional<string>>()>;
// What libpith_parquet.so offers, under the name pith_open_parquet.
using OpenParquet = TableRows (*)(const string& path, const string& column, int64_t row);

// The chunks of all files, in order, from a position on. .jsonl and .ndjson hold a document a line,
// .parquet a document a row; any other file is one. Each may be compressed: .gz, .zst. A file that
// cannot be read or is cut short is an Error that names it.
class InputReader {
 public:
  InputReader(vector<InputFile> files, ReadOptions options, InputPosition start = {});
  bool next(Chunk& chunk); // false at the end
 private:
  bool next_rows(Chunk& chunk);
  bool next_bytes(Chunk& chunk);

  vector<InputFile> files_;
  ReadOptions options_;
  InputPosition at_;
  shared_ptr<class ByteSource> source_;
  TableRows table_;
  string pending_; // read, not handed out: never a whole line or file
  uint64_t bytes_before_ = 0; // in the files before this one
};

// Parses the lines of a chunk; blank lines are no documents.
void read_lines(Chunk& chunk, const ReadOptions& options);

struct EncodeSettings {
  ReadOptions read;
  uint64_t min_length = 0, max_length = UINT64_MAX; // bytes of a document's text
  optional<int32_t> end_id; // put behind each document
  int workers = 1;
  uint64_t bytes_in_flight = uint64_t{32} << 20; // of text read and not handed out
};

class CorpusEncoder {
 public:
  CorpusEncoder(
    vector<InputFile> files, Tokenizer tokenizer, EncodeSettings settings, InputPosition start);
  // The next chunk in the order of the files, encoded; false at the end. An Error of the reader
  // comes after all chunks before it.
  bool next(Chunk& chunk);
 private:
  Chunk encode(Chunk chunk);

  InputReader reader_;
  Tokenizer tokenizer_;
  EncodeSettings settings_;
  std::counting_semaphore<> idle_; // workers; a chunk's thread waits for one
  std::exception_ptr error_; // of the reader
  bool ended_ = false;
  uint64_t in_flight_ = 0;
  // Chunks in order, and the bytes of their texts. The last member: the first to go, when all
  // threads have ended.
  deque<pair<std::future<Chunk>, uint64_t>> slots_;
};
}
