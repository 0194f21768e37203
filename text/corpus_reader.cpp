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

using Kind = Document::Kind;

constexpr size_t kRead = 256 << 10, kChunk = 512 << 10;

// --- which files ---

using Strings = std::vector<std::string>;

Strings files_below(const std::string& folder, const Strings& endings) {
  Strings found;
  for (auto entry = fs::recursive_directory_iterator(folder); entry != end(entry); ++entry) {
    const std::string name = entry->path().filename().string();
    const auto fits = [&](const std::string& ending) {
      return ending == "none" ? name.find('.') == name.npos : name.ends_with(ending);
    };
    if (name.starts_with('.'))
      entry.disable_recursion_pending();
    else if ((endings.empty() || std::ranges::any_of(endings, fits)) && entry->is_regular_file())
      found.push_back(entry->path().string());
  }
  std::ranges::sort(found);
  return found;
}

Strings expand(const std::string& path) {
  if (fs::exists(path)) return {path};
  glob_t matches{};
  ::glob(path.c_str(), GLOB_NOSORT, nullptr, &matches);
  Strings found(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  ::globfree(&matches);
  PITH_CHECK(!found.empty(), "{} does not exist", path);
  std::ranges::sort(found);
  return found;
}

bool is_zstd(std::string_view path) { return path.ends_with(".zst") || path.ends_with(".zstd"); }

bool is_table(std::string_view path) { return path.ends_with(".parquet"); }
bool has_lines(std::string_view path) {
  if (path.ends_with(".gz") || is_zstd(path)) path = path.substr(0, path.rfind('.'));
  return path.ends_with(".jsonl") || path.ends_with(".ndjson");
}

// The plugin that `./pith setup --parquet` makes possible; this program does not link libparquet.
const ParquetPlugin& parquet() {
  static void* library = ::dlopen("libpith_parquet.so", RTLD_NOW | RTLD_LOCAL);
  static void* symbol = library ? ::dlsym(library, "pith_parquet_plugin") : nullptr;
  if (!symbol) {
    const char* why = ::dlerror();
    PITH_FAIL_HINT("run ./pith setup --parquet, then ./pith build",
        "Parquet files cannot be read: {}", why ? why : "the plugin is damaged");
  }
  return *static_cast<const ParquetPlugin*>(symbol);
}

void refuse(Document& document, std::string problem) {
  document.kind = Kind::kBad;
  document.text.clear();
  document.problem = std::move(problem);
}

void refuse_long(Document& document, const char* what, uint64_t limit) {
  refuse(document, fmt::format("{} is longer than {} bytes (--max-line)", what, limit));
}

bool is_utf8(std::string_view text) { return simdjson::validate_utf8(text.data(), text.size()); }

// --- JSON ---

using Element = simdjson::dom::element;

simdjson::simdjson_result<Element> find(Element element, std::string_view path) {
  while (true) {
    const size_t dot = path.find('.');
    const auto inner = element[path.substr(0, dot)];
    if (inner.error() || dot == path.npos) return inner;
    element = inner.value_unsafe();
    path.remove_prefix(dot + 1);
  }
}

// `line` has SIMDJSON_PADDING readable bytes behind it.
void read_json(simdjson::dom::parser& parser, std::string_view line, const ReadOptions& options,
    Document& out) {
  Element root, id, field;
  std::string_view text;
  if (const auto error = parser.parse(line.data(), line.size(), false).get(root))
    return refuse(out, fmt::format("not JSON: {}", simdjson::error_message(error)));
  if (!options.id_field.empty() && !find(root, options.id_field).get(id))
    out.id = id.get(text) ? simdjson::minify(id) : std::string(text);
  const std::string& name = options.text_field;
  if (find(root, name).get(field)) return refuse(out, fmt::format("no field \"{}\"", name));
  if (field.get(text))
    return refuse(
        out, fmt::format("field \"{}\" is {:.40}, not text", name, simdjson::minify(field)));
  out.text = text;
}

}  // namespace

std::vector<InputFile> list_inputs(
    const std::vector<std::string>& paths, const std::vector<std::string>& endings) {
  std::vector<InputFile> files;
  for (const std::string& pattern : paths)
    for (const std::string& path : expand(pattern))  // named singly: whatever its ending
      for (const std::string& file :
          fs::is_directory(path) ? files_below(path, endings) : std::vector{path}) {
        struct stat info{};
        PITH_CHECK(::stat(file.c_str(), &info) == 0 && ::access(file.c_str(), R_OK) == 0,
            "cannot read {}: {}", file, std::generic_category().message(errno));
        files.push_back({file, static_cast<uint64_t>(info.st_size),
            info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec});
      }
  return files;
}

// --- their bytes ---

// A file's bytes after decompression. zlib passes through what is not gzip data.
class ByteSource {
 public:
  explicit ByteSource(const std::string& path)
      : path_(path),
        file_(::gzopen(path.c_str(), "rbe"), &::gzclose),
        zstd_(nullptr, &::ZSTD_freeDStream) {
    PITH_CHECK(file_, "cannot open {}: {}", path, std::generic_category().message(errno));
    ::gzbuffer(file_.get(), kRead);
    if (!is_zstd(path)) return;
    zstd_.reset(ZSTD_createDStream());
    buffer_.resize(kRead);
  }

  size_t read(char* out, size_t size) {  // 0 only at the end
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
      ::gzdirect(file_.get());  // looks at the first bytes: what is not compressed then seeks
      PITH_CHECK(::gzseek(file_.get(), static_cast<off_t>(bytes), SEEK_SET) >= 0,
          "cannot read {} from byte {}", path_, bytes);
      return;
    }
    for (std::string skipped(kRead, '\0'); bytes > 0;) {
      const size_t n = read(skipped.data(), std::min<uint64_t>(bytes, kRead));
      PITH_CHECK(n > 0, "{} is shorter than it was", path_);
      bytes -= n;
    }
  }

  uint64_t consumed() const {  // bytes of the file itself
    return static_cast<uint64_t>(std::max<off_t>(::gzoffset(file_.get()), 0));
  }
 private:
  size_t read_file(char* out, size_t size) {
    const int n = ::gzread(file_.get(), out, static_cast<unsigned>(size));
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

  std::string path_;
  std::unique_ptr<gzFile_s, int (*)(gzFile)> file_;
  std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> zstd_;
  std::string buffer_;
  ZSTD_inBuffer input_{};
  size_t more_ = 1;  // not 0 inside a frame, and before the first
};

InputReader::InputReader(std::vector<InputFile> files, ReadOptions options, InputPosition start)
    : files_(std::move(files)), options_(std::move(options)), at_(start) {
  for (int64_t i = 0; i < start.file; ++i) bytes_before_ += files_[index(i)].bytes;
}

bool InputReader::next_rows(Chunk& chunk) {
  std::string error;
  if (!table_) {
    const char* column = options_.text_field.c_str();
    table_.reset(parquet().open(chunk.path.c_str(), column, at_.line, error), parquet().close);
  }
  std::vector<std::optional<std::string>> texts;
  if (table_) parquet().next(table_.get(), texts, error);
  PITH_CHECK(error.empty(), "{}: {}", chunk.path, error);
  for (auto& text : texts) {
    Document& document = chunk.documents.emplace_back();
    document.line = ++at_.line;
    if (text) document.text = std::move(*text);
    if (!text)
      refuse(document, fmt::format("column \"{}\" is null", options_.text_field));
    else if (document.text.size() > options_.max_line)
      refuse_long(document, "this row", options_.max_line);
    else if (!is_utf8(document.text))
      refuse(document, "not UTF-8 text");
  }
  at_.offset = static_cast<uint64_t>(at_.line);
  return !texts.empty();
}

bool InputReader::next_file(Chunk& chunk) {
  if (at_.offset > 0) return false;
  while (pending_.size() <= options_.max_line && read_more()) {}
  Document& document = chunk.documents.emplace_back();
  document.text = std::exchange(pending_, {});
  if (document.text.size() > options_.max_line)
    refuse_long(document, "this file, one document,", options_.max_line);
  else if (document.text.find('\0') != std::string::npos || !is_utf8(document.text))
    document.kind = Kind::kNotText;
  at_.offset = 1;
  return true;
}

bool InputReader::read_more() {
  const size_t size = pending_.size();
  pending_.resize(size + kRead);
  const size_t n = source_->read(pending_.data() + size, kRead);
  pending_.resize(size + n);
  return n > 0;
}

bool InputReader::next_lines(Chunk& chunk) {
  size_t end = 0;  // of the last whole line
  while (end == 0 || pending_.size() < kChunk) {
    const size_t searched = pending_.size();
    if (end == 0 && searched > options_.max_line) return pass_line(chunk);
    if (!read_more()) {
      end = searched;
      break;
    }
    const size_t newline = std::string_view(pending_).substr(searched).rfind('\n');
    if (newline != pending_.npos) end = searched + newline + 1;
  }
  if (end == 0) return false;
  chunk.lines.reserve(end + simdjson::SIMDJSON_PADDING);
  chunk.lines.assign(pending_, 0, end);
  pending_.erase(0, end);
  at_.offset += end;
  at_.line += std::ranges::count(chunk.lines, '\n');
  return true;
}

// Passes over a line that is too long to be held: all of `pending_`, and more.
bool InputReader::pass_line(Chunk& chunk) {
  size_t end = 0;
  while (end == 0) {
    at_.offset += pending_.size();
    pending_.clear();
    if (!read_more()) break;
    end = pending_.find('\n') + 1;
  }
  at_.offset += end;
  pending_.erase(0, end);
  chunk.documents.emplace_back().line = ++at_.line;
  refuse_long(chunk.documents[0], "this line", options_.max_line);
  return true;
}

bool InputReader::next(Chunk& chunk) {
  for (; at_.file < std::ssize(files_); at_ = {at_.file + 1}) {
    const InputFile& file = files_[index(at_.file)];
    const bool table = is_table(file.path), lines = has_lines(file.path);
    chunk = {};
    chunk.path = file.path;
    chunk.line = at_.line;
    if (!table && !source_) {
      source_ = std::make_shared<ByteSource>(file.path);
      if (lines) source_->skip(at_.offset);
    }
    if (table ? next_rows(chunk) : lines ? next_lines(chunk) : next_file(chunk)) {
      chunk.end = at_;
      chunk.bytes_read = bytes_before_ + (source_ ? source_->consumed() : 0);
      return true;
    }
    source_.reset();
    table_.reset();
    bytes_before_ += file.bytes;
  }
  return false;
}

void read_lines(Chunk& chunk, const ReadOptions& options) {
  std::string bytes = std::exchange(chunk.lines, {});
  bytes.reserve(bytes.size() + simdjson::SIMDJSON_PADDING);
  simdjson::dom::parser parser;
  int64_t line = chunk.line;
  size_t begin = line == 0 && bytes.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  for (size_t end; begin < bytes.size(); begin = end + 1) {
    ++line;
    end = std::min(bytes.find('\n', begin), bytes.size());
    const std::string_view text(bytes.data() + begin, end - begin);
    if (text.find_first_not_of(" \t\r") == text.npos) continue;
    Document& document = chunk.documents.emplace_back();
    document.line = line;
    if (text.size() > options.max_line)
      refuse_long(document, "this line", options.max_line);
    else
      read_json(parser, text, options, document);
  }
}

// --- their ids ---

CorpusEncoder::CorpusEncoder(
    std::vector<InputFile> files, Tokenizer tokenizer, EncodeSettings settings, InputPosition start)
    : reader_(std::move(files), settings.read, start),
      tokenizer_(std::move(tokenizer)),
      settings_(std::move(settings)) {
  for (int i = 0; i < settings_.workers; ++i) threads_.emplace_back([this] { work(); });
}

CorpusEncoder::~CorpusEncoder() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void CorpusEncoder::work() {
  while (true) {
    std::packaged_task<Chunk()> task;
    {
      const std::lock_guard turn(reading_);
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] {
        return ended_ || slots_.empty() ||
            (in_flight_ < settings_.bytes_in_flight && std::ssize(slots_) < 8 * settings_.workers);
      });
      if (ended_) return;
      lock.unlock();
      Chunk chunk;
      std::exception_ptr error;
      bool found = true;
      try {
        found = reader_.next(chunk);
      } catch (...) { error = std::current_exception(); }
      uint64_t bytes = chunk.lines.size();
      for (const Document& document : chunk.documents) bytes += document.text.size();
      task = std::packaged_task<Chunk()>([this, error, chunk = std::move(chunk)]() mutable {
        if (error) std::rethrow_exception(error);
        encode(chunk);
        return std::move(chunk);
      });
      lock.lock();
      ended_ = ended_ || !found || error;
      changed_.notify_all();
      if (!found) return;
      slots_.emplace_back(task.get_future(), bytes);
      in_flight_ += bytes;
    }
    task();
  }
}

bool CorpusEncoder::next(Chunk& chunk) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_ || !slots_.empty(); });
  if (slots_.empty()) return false;
  auto& first = slots_.front();  // in line, where it counts, until it is done
  lock.unlock();
  first.first.wait();
  lock.lock();
  auto [encoded, bytes] = std::move(first);
  in_flight_ -= bytes;
  slots_.pop_front();
  changed_.notify_all();
  chunk = encoded.get();
  return true;
}

void CorpusEncoder::encode(Chunk& chunk) const {
  read_lines(chunk, settings_.read);
  for (Document& document : chunk.documents) {
    const std::string text = std::exchange(document.text, {});
    document.bytes = text.size();
    if (document.kind != Kind::kGood) continue;
    document.kind = text.empty()             ? Kind::kEmpty
        : text.size() < settings_.min_length ? Kind::kShort
        : text.size() > settings_.max_length ? Kind::kLong
                                             : Kind::kGood;
    if (document.kind != Kind::kGood) continue;
    document.hash = XXH3_64bits(text.data(), text.size());
    const XXH128_hash_t sum = XXH3_128bits(text.data(), text.size());
    document.fingerprint = {sum.high64, sum.low64};
    // A text that spells <|endoftext|> does not end there.
    Encoding made = tokenizer_.encode(text, {.add_special_tokens = false, .parse_special = false});
    chunk.dropped_characters += made.dropped_characters;
    document.ids = std::move(made.ids);
    if (settings_.end_id) document.ids.push_back(*settings_.end_id);
  }
}

}  // namespace pith
