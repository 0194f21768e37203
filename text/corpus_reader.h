// Documents out of files: which files, decompression, chunks of whole lines, JSON.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pith {

struct ReadOptions {
  std::string text_field = "text";  // of a JSON line or a table; "a.b" is b inside a
  std::string id_field = "";        // named in reports; "" = none
  uint64_t max_line = 16'000'000;   // bytes of a line, or of a file that is one document
};

struct InputFile {
  std::string path;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;
};

// Files, globs, and the files below folders in the order of their paths' bytes. From folders come
// only names that end in one of `endings` ("none": names without a dot; empty list: all). Left out
// there: names that begin with a dot, linked folders (loops), and what is not a file.
std::vector<InputFile> list_inputs(
    const std::vector<std::string>& paths, const std::vector<std::string>& endings);

// Where a document ends: bytes (after decompression) and lines, or rows of a table, before it.
struct InputPosition {
  int64_t file = 0;
  uint64_t offset = 0;
  int64_t line = 0;
};

struct ChunkPlace {
  std::string path;
  InputPosition end;
  uint64_t bytes_read = 0;  // of all files up to here, as they lie on the disk
};

// Documents of one file as they lie there. .jsonl and .ndjson hold a document a line, .parquet a
// document a row; any other file is one document. Each may be compressed: .gz, .zst.
struct Chunk : ChunkPlace {
  enum class Layout { kLines, kRows, kWhole } layout = Layout::kWhole;
  std::string bytes;
  std::vector<int64_t> row_sizes;  // kRows: bytes of each row, -1 where there is no text
  int64_t line = 0;                // lines before the first one
  std::string problem;             // why this line or file is no document; then bytes is empty
};

// The chunks of all files, in order, from a position on. Chunks are about 512 kB, or one line.
// A file that cannot be read or ends inside its compressed data is an Error that names it.
class InputReader {
 public:
  InputReader(std::vector<InputFile> files, ReadOptions options, InputPosition start = {});
  ~InputReader();
  bool next(Chunk& chunk);  // false at the end
 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct Document {
  std::string text, id;
  int64_t line = 0;     // from 1; 0 for a file that is one document
  std::string problem;  // not empty: a bad line, and why
  bool is_text = true;  // false: a whole file that is binary or not UTF-8
};

// All documents of a chunk; blank lines are none.
std::vector<Document> read_documents(const Chunk& chunk, const ReadOptions& options);

// What libpith_parquet.so offers, under the name pith_parquet_plugin.
struct ParquetPlugin {
  void* (*open)(const char* path, const char* column, int64_t first_row, std::string& error);
  bool (*next)(void* handle, std::string& bytes, std::vector<int64_t>& sizes, std::string& error);
  void (*close)(void* handle);
};

}  // namespace pith
