#include "text/corpus_reader.h"
#include <dlfcn.h>
#include <glob.h>
#include <simdjson.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include <zlib.h>
#include <zstd.h>

namespace pith {
namespace {
constexpr size_t kRead = 256 << 10, kChunk = 512 << 10;

// --- which files ---

using Strings = vector<string>;

Strings files_below(const string& folder, const Strings& endings) {
  Strings found;
  for (auto entry = fs::recursive_directory_iterator(folder); entry != end(entry); ++entry) {
    const string name = entry->path().filename().string();
    const auto fits = [&](const string& ending) {
      return ending == "none" ? name.find('.') == name.npos : name.ends_with(ending);
    };
    if (name.starts_with('.')) entry.disable_recursion_pending();
    else if ((endings.empty() || ranges::any_of(endings, fits)) && entry->is_regular_file())
      found.push_back(entry->path().string());
  }
  ranges::sort(found);
  return found;
}

Strings expand(const string& path) {
  if (fs::exists(path)) return {path};
  glob_t matches{};
  ::glob(path.c_str(), 0, nullptr, &matches);
  Strings found(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  ::globfree(&matches);
  PITH_CHECK(!found.empty(), "{} does not exist", path);
  return found;
}

bool is_zstd(string_view path) { return path.ends_with(".zst") || path.ends_with(".zstd"); }

bool has_lines(string_view path) {
  if (path.ends_with(".gz") || is_zstd(path)) path = path.substr(0, path.rfind('.'));
  return path.ends_with(".jsonl") || path.ends_with(".ndjson");
}

// The plugin that `./pith setup --parquet` makes possible; this program does not link libparquet.
OpenParquet parquet() {
  static void* library = ::dlopen("libpith_parquet.so", RTLD_NOW | RTLD_LOCAL);
  static void* symbol = library ? ::dlsym(library, "pith_open_parquet") : nullptr;
  if (!symbol)
    PITH_FAIL_HINT("run ./pith setup --parquet, then ./pith build",
      "Parquet files cannot be read: there is no plugin libpith_parquet.so that fits");
  return *static_cast<const OpenParquet*>(symbol);
}

void refuse(Document& document, string problem) {
  document.text.clear();
  document.problem = std::move(problem);
}

void refuse_long(Document& document, const char* what, uint64_t limit) {
  refuse(document, fmt::format("{} is longer than {} bytes (--max-line)", what, limit));
}

bool is_utf8(string_view text) { return simdjson::validate_utf8(text.data(), text.size()); }

// --- JSON ---

using Element = simdjson::dom::element;

simdjson::simdjson_result<Element> find(Element element, string_view path) {
  while (true) {
    const size_t dot = path.find('.');
    const auto inner = element[path.substr(0, dot)];
    if (inner.error() || dot == path.npos) return inner;
    element = inner.value_unsafe();
    path.remove_prefix(dot + 1);
  }
}

// `line` has SIMDJSON_PADDING readable bytes behind it.
void read_json(
  simdjson::dom::parser& parser, string_view line, const ReadOptions& options, Document& out) {
  Element root, id, field;
  string_view text;
  if (const auto error = parser.parse(line.data(), line.size(), false).get(root))
    return refuse(out, fmt::format("not JSON: {}", simdjson::error_message(error)));
  if (!options.id_field.empty() && !find(root, options.id_field).get(id))
    out.id = id.get(text) ? simdjson::minify(id) : string(text);
  const string& name = options.text_field;
  if (find(root, name).get(field)) return refuse(out, fmt::format("no field \"{}\"", name));
  if (field.get(text))
    return refuse(
      out, fmt::format("field \"{}\" is {:.40}, not text", name, simdjson::minify(field)));
  out.text = text;
}
}

vector<InputFile> list_inputs(const vector<string>& paths, const vector<string>& endings) {
  vector<InputFile> files;
  for (const string& pattern: paths)
    for (const string& path: expand(pattern)) // named singly: whatever its ending
      for (const string& file: fs::is_directory(path) ? files_below(path, endings) : vector{path}) {
        struct stat info{};
        PITH_CHECK(::stat(file.c_str(), &info) == 0 && ::access(file.c_str(), R_OK) == 0,
          "cannot read {}: {}", file, std::generic_category().message(errno));
        files.push_back({file, uint64_t(info.st_size),
          info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec});
      }
  return files;
}

// --- their bytes ---

// A file's bytes after decompression. zlib passes through what is not gzip data.
class ByteSource {
 public:
  explicit ByteSource(const string& path)
      : path_(path), file_(::gzopen(path.c_str(), "rbe"), &::gzclose),
        zstd_(nullptr, &::ZSTD_freeDStream) {
    PITH_CHECK(file_, "cannot open {}: {}", path, std::generic_category().message(errno));
    ::gzbuffer(file_.get(), kRead);
    if (!is_zstd(path)) return;
    zstd_.reset(ZSTD_createDStream());
    buffer_.resize(kRead);
  }

  size_t read(char* out, size_t size) { // 0 only at the end
    if (!zstd_) return read_file(out, size);
    ZSTD_outBuffer output{out, size, 0};
    while (true) {
      if (input_.pos < input_.size || more_ != 0) {
        more_ = ZSTD_decompressStream(zstd_.get(), &output, &input_);
        const bool failed = ZSTD_isError(more_) != 0;
        PITH_CHECK(!failed, "cannot decompress {}: {}", path_, ZSTD_getErrorName(more_));
        if (output.pos > 0) return output.pos;
        if (input_.pos < input_.size) continue;
      }
      input_ = {buffer_.data(), read_file(buffer_.data(), buffer_.size()), 0};
      if (input_.size > 0) continue;
      if (more_ != 0) fail_short();
      return 0;
    }
  }

  void skip(uint64_t bytes) {
    if (!zstd_) {
      ::gzdirect(file_.get()); // looks at the first bytes: what is not compressed then seeks
      PITH_CHECK(::gzseek(file_.get(), off_t(bytes), SEEK_SET) >= 0, "cannot read {} from byte {}",
        path_, bytes);
      return;
    }
    for (string skipped(kRead, '\0'); bytes > 0;) {
      const size_t n = read(skipped.data(), min<uint64_t>(bytes, kRead));
      PITH_CHECK(n > 0, "{} is shorter than it was", path_);
      bytes -= n;
    }
  }

  uint64_t consumed() const { // bytes of the file itself
    return uint64_t(max<off_t>(::gzoffset(file_.get()), 0));
  }
 private:
  size_t read_file(char* out, size_t size) {
    const int n = ::gzread(file_.get(), out, unsigned(size));
    int code = Z_OK;
    const char* message = ::gzerror(file_.get(), &code);
    PITH_CHECK(!path_.ends_with(".gz") || !::gzdirect(file_.get()), "{} is not gzip data", path_);
    if (n <= 0 && code == Z_BUF_ERROR) fail_short();
    PITH_CHECK(n >= 0, "cannot read {}: {}", path_, message);
    return index(n);
  }
  [[noreturn]] void fail_short() const {
    PITH_FAIL_HINT("copy or download it again", "{} is cut short: its data ends early", path_);
  }

  string path_;
  unique_ptr<gzFile_s, int (*)(gzFile)> file_;
  unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> zstd_;
  string buffer_;
  ZSTD_inBuffer input_{};
  size_t more_ = 1; // not 0 inside a frame, and before the first
};

InputReader::InputReader(vector<InputFile> files, ReadOptions options, InputPosition start)
    : files_(std::move(files)), options_(std::move(options)), at_(start) {
  for (int64_t i = 0; i < start.file; ++i) bytes_before_ += files_[index(i)].bytes;
}

bool InputReader::next_rows(Chunk& chunk) {
  const OpenParquet open = parquet();
  vector<optional<string>> texts;
  try {
    if (!table_) table_ = open(chunk.path, options_.text_field, at_.line);
    texts = table_();
  } catch (const exception& failure) { PITH_FAIL("{}: {}", chunk.path, failure); }
  for (auto& text: texts) {
    Document& document = chunk.documents.emplace_back();
    document.line = ++at_.line;
    if (text) document.text = std::move(*text);
    if (!text) refuse(document, fmt::format("column \"{}\" is null", options_.text_field));
    else if (document.text.size() > options_.max_line)
      refuse_long(document, "this row", options_.max_line);
    else if (!is_utf8(document.text)) refuse(document, "not UTF-8 text");
  }
  return !texts.empty();
}

// Whole lines, about kChunk bytes of them, or a whole file. Of a line too long to be held all bytes
// are passed over, of a file the rest is left.
bool InputReader::next_bytes(Chunk& chunk) {
  const bool lines = has_lines(chunk.path);
  if (!lines && at_.offset > 0) return false;
  size_t end = 0; // of the last whole line, or of the long one
  bool too_long = false; // what was read so far is part of one line, and gone
  for (bool more = true; more && (end == 0 || (!too_long && pending_.size() < kChunk));) {
    if (end == 0 && pending_.size() > options_.max_line) {
      too_long = true;
      at_.offset += pending_.size();
      pending_.clear();
      if (!lines) break;
    }
    const size_t searched = pending_.size();
    pending_.resize(searched + kRead);
    const size_t read = source_->read(pending_.data() + searched, kRead);
    pending_.resize(searched + read);
    more = read > 0;
    const string_view fresh = string_view(pending_).substr(searched);
    const size_t newline = too_long ? fresh.find('\n') : fresh.rfind('\n');
    if (!more) end = pending_.size();
    else if (lines && newline != fresh.npos) end = searched + newline + 1;
  }
  if (lines && end == 0 && !too_long) return false;
  string bytes = pending_.substr(0, end);
  pending_.erase(0, end);
  at_.offset += lines ? end : 1;
  if (lines && !too_long) {
    at_.line += ranges::count(bytes, '\n');
    chunk.lines = std::move(bytes);
    return true;
  }
  Document& document = chunk.documents.emplace_back();
  if (lines) document.line = ++at_.line;
  if (too_long)
    refuse_long(document, lines ? "this line" : "this file, one document,", options_.max_line);
  else if (bytes.find('\0') != bytes.npos || !is_utf8(bytes)) document.skipped = "not UTF-8 text";
  if (!too_long) document.text = std::move(bytes);
  return true;
}

bool InputReader::next(Chunk& chunk) {
  for (; at_.file < ssize(files_); at_ = {at_.file + 1}) {
    const InputFile& file = files_[index(at_.file)];
    const bool table = file.path.ends_with(".parquet");
    chunk = {.path = file.path, .line = at_.line};
    if (!table && !source_) {
      source_ = make_shared<ByteSource>(file.path);
      if (has_lines(file.path)) source_->skip(at_.offset);
    }
    if (table ? next_rows(chunk) : next_bytes(chunk)) {
      chunk.end = at_;
      chunk.bytes_read = bytes_before_ + (source_ ? source_->consumed() : 0);
      return true;
    }
    source_.reset();
    table_ = nullptr;
    bytes_before_ += file.bytes;
  }
  return false;
}

void read_lines(Chunk& chunk, const ReadOptions& options) {
  string bytes = exchange(chunk.lines, {});
  bytes.reserve(bytes.size() + simdjson::SIMDJSON_PADDING);
  simdjson::dom::parser parser;
  int64_t line = chunk.line;
  size_t begin = line == 0 && bytes.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  for (size_t end; begin < bytes.size(); begin = end + 1) {
    ++line;
    end = min(bytes.find('\n', begin), bytes.size());
    const string_view text(bytes.data() + begin, end - begin);
    if (text.find_first_not_of(" \t\r") == text.npos) continue;
    Document& document = chunk.documents.emplace_back();
    document.line = line;
    if (text.size() > options.max_line) refuse_long(document, "this line", options.max_line);
    else read_json(parser, text, options, document);
  }
}

// --- their ids ---

CorpusEncoder::CorpusEncoder(
  vector<InputFile> files, Tokenizer tokenizer, EncodeSettings settings, InputPosition start)
    : reader_(std::move(files), settings.read, start), tokenizer_(std::move(tokenizer)),
      settings_(std::move(settings)), idle_(settings_.workers) {}

bool CorpusEncoder::next(Chunk& chunk) {
  // Reads ahead as far as memory allows, with a thread a chunk: one that takes long delays no
  // other.
  while (!ended_ &&
    (slots_.empty() ||
      (in_flight_ < settings_.bytes_in_flight && ssize(slots_) < 8 * settings_.workers))) {
    Chunk read;
    try {
      ended_ = !reader_.next(read);
    } catch (...) {
      error_ = std::current_exception();
      ended_ = true;
    }
    if (ended_) break;
    uint64_t bytes = read.lines.size();
    for (const Document& document: read.documents) bytes += document.text.size();
    auto work = [this, read = std::move(read)]() mutable { return encode(std::move(read)); };
    slots_.emplace_back(std::async(std::launch::async, std::move(work)), bytes);
    in_flight_ += bytes;
  }
  if (slots_.empty() && error_) std::rethrow_exception(error_);
  if (slots_.empty()) return false;
  chunk = slots_.front().first.get();
  in_flight_ -= slots_.front().second;
  slots_.pop_front();
  return true;
}

Chunk CorpusEncoder::encode(Chunk chunk) {
  idle_.acquire();
  const shared_ptr<void> at_the_end(nullptr, [&](void*) { idle_.release(); });
  read_lines(chunk, settings_.read);
  for (Document& document: chunk.documents) {
    const string text = exchange(document.text, {});
    document.bytes = text.size();
    if (!document.problem.empty() || !document.skipped.empty()) continue;
    document.skipped = text.empty()        ? "empty"
      : text.size() < settings_.min_length ? "too short"
      : text.size() > settings_.max_length ? "too long"
                                           : "";
    if (!document.skipped.empty()) continue;
    document.hash = XXH3_64bits(text.data(), text.size());
    const XXH128_hash_t sum = XXH3_128bits(text.data(), text.size());
    document.fingerprint = {sum.high64, sum.low64};
    // A text that spells <|endoftext|> does not end there.
    Encoding made = tokenizer_.encode(text, {.add_special_tokens = false, .parse_special = false});
    chunk.dropped_characters += made.dropped_characters;
    document.ids = std::move(made.ids);
    if (settings_.end_id) document.ids.push_back(*settings_.end_id);
  }
  return chunk;
}
}
