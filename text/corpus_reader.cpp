#include "text/corpus_reader.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <glob.h>
#include <simdjson.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "text/parquet/parquet_plugin.h"

namespace pith {
namespace {

namespace fs = std::filesystem;

constexpr size_t kRead = 256 << 10;
constexpr size_t kChunk = 512 << 10;

std::string reason() { return std::generic_category().message(errno); }

// --- which files ---

bool wanted(const std::string& name, const std::vector<std::string>& endings) {
  return endings.empty() || std::any_of(endings.begin(), endings.end(), [&](const auto& ending) {
    return ending == "none" ? name.find('.') == name.npos : name.ends_with(ending);
  });
}

std::vector<std::string> files_below(
    const std::string& folder, const std::vector<std::string>& endings) {
  std::vector<std::string> found;
  for (auto entry = fs::recursive_directory_iterator(folder);
      entry != fs::recursive_directory_iterator(); ++entry) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with('.')) {
      entry.disable_recursion_pending();
    } else if (wanted(name, endings) && entry->is_regular_file()) {
      found.push_back(entry->path().string());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<std::string> expand(const std::string& path) {
  if (fs::exists(path)) return {path};
  glob_t matches{};
  const int status = ::glob(path.c_str(), GLOB_NOSORT, nullptr, &matches);
  std::vector<std::string> found(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  ::globfree(&matches);
  PITH_CHECK(status == 0 && !found.empty(), "{} does not exist", path);
  std::sort(found.begin(), found.end());
  return found;
}

bool is_gzip(std::string_view path) { return path.ends_with(".gz"); }
bool is_zstd(std::string_view path) { return path.ends_with(".zst") || path.ends_with(".zstd"); }

Layout layout_of(std::string_view path) {
  if (path.ends_with(".parquet")) return Layout::kRows;
  if (is_gzip(path) || is_zstd(path)) path = path.substr(0, path.rfind('.'));
  const bool lines = path.ends_with(".jsonl") || path.ends_with(".ndjson");
  return lines ? Layout::kLines : Layout::kWhole;
}

// --- their bytes ---

// A file's bytes after decompression.
class ByteSource {
 public:
  explicit ByteSource(const std::string& path)
      : path_(path), descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    PITH_CHECK(descriptor_ >= 0, "cannot open {}: {}", path, reason());
    if (is_gzip(path)) {
      gzip_ = ::gzdopen(::dup(descriptor_), "rb");
      PITH_CHECK(gzip_, "cannot open {}: out of memory", path);
      ::gzbuffer(gzip_, kRead);
    } else if (is_zstd(path)) {
      zstd_ = ZSTD_createDStream();
      buffer_.resize(kRead);
    }
  }
  ~ByteSource() {
    if (gzip_) ::gzclose(gzip_);
    ZSTD_freeDStream(zstd_);
    ::close(descriptor_);
  }
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  size_t read(char* out, size_t size) {  // 0 only at the end
    return gzip_ ? read_gzip(out, size) : zstd_ ? read_zstd(out, size) : read_file(out, size);
  }
  void skip(uint64_t bytes) {
    if (!gzip_ && !zstd_) {
      PITH_CHECK(::lseek(descriptor_, static_cast<off_t>(bytes), SEEK_SET) >= 0,
          "cannot read {}: {}", path_, reason());
      return;
    }
    std::string skipped(kRead, '\0');
    while (bytes > 0) {
      const size_t n = read(skipped.data(), std::min<uint64_t>(bytes, kRead));
      PITH_CHECK(n > 0, "{} is shorter than it was", path_);
      bytes -= n;
    }
  }
  uint64_t consumed() const {  // bytes of the file itself
    const off_t at = gzip_ ? ::gzoffset(gzip_) : ::lseek(descriptor_, 0, SEEK_CUR);
    return static_cast<uint64_t>(std::max<off_t>(at, 0));
  }

 private:
  size_t read_file(char* out, size_t size) {
    ssize_t n;
    do n = ::read(descriptor_, out, size);
    while (n < 0 && errno == EINTR);
    PITH_CHECK(n >= 0, "cannot read {}: {}", path_, reason());
    return static_cast<size_t>(n);
  }
  size_t read_gzip(char* out, size_t size) {
    const int n = ::gzread(gzip_, out, static_cast<unsigned>(size));
    PITH_CHECK(!::gzdirect(gzip_), "{} is not gzip data", path_);
    int code = Z_OK;
    const char* message = ::gzerror(gzip_, &code);
    if (n <= 0 && code == Z_BUF_ERROR) fail_short();
    PITH_CHECK(n >= 0, "cannot decompress {}: {}", path_, message);
    return static_cast<size_t>(n);
  }
  size_t read_zstd(char* out, size_t size) {
    ZSTD_outBuffer output{out, size, 0};
    while (true) {
      if (input_.pos < input_.size || more_ != 0) {
        more_ = ZSTD_decompressStream(zstd_, &output, &input_);
        PITH_CHECK(
            !ZSTD_isError(more_), "cannot decompress {}: {}", path_, ZSTD_getErrorName(more_));
        if (output.pos > 0) return output.pos;
        if (input_.pos < input_.size) continue;
      }
      input_ = {buffer_.data(), read_file(buffer_.data(), buffer_.size()), 0};
      if (input_.size > 0) continue;
      if (more_ != 0) fail_short();
      return 0;
    }
  }
  [[noreturn]] void fail_short() const {
    PITH_FAIL_HINT(
        "copy or download it again", "{} is cut short: its compressed data ends early", path_);
  }

  std::string path_;
  int descriptor_;
  gzFile gzip_ = nullptr;
  ZSTD_DStream* zstd_ = nullptr;
  std::string buffer_;
  ZSTD_inBuffer input_{};
  size_t more_ = 1;  // not 0 inside a frame, and before the first
};

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

// The texts of a table's column, from a row on.
class TableSource {
 public:
  TableSource(const std::string& path, const std::string& column, int64_t first_row) : path_(path) {
    std::string error;
    handle_ = parquet().open(path.c_str(), column.c_str(), first_row, error);
    PITH_CHECK(handle_, "{}: {}", path, error);
  }
  ~TableSource() { parquet().close(handle_); }
  TableSource(const TableSource&) = delete;
  TableSource& operator=(const TableSource&) = delete;

  bool next(std::string& bytes, std::vector<int64_t>& sizes) {  // as in Chunk; false at the end
    std::string error;
    const bool found = parquet().next(handle_, bytes, sizes, error);
    PITH_CHECK(error.empty(), "{}: {}", path_, error);
    return found;
  }

 private:
  std::string path_;
  void* handle_ = nullptr;
};

std::string too_long(const char* what, uint64_t limit) {
  return fmt::format("{} is longer than {} bytes (--max-line)", what, limit);
}

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

const char* type_name(Element element) {
  return element.is_array()    ? "an array"
         : element.is_object() ? "an object"
         : element.is_bool()   ? "true or false"
         : element.is_null()   ? "null"
                               : "a number";
}

// `line` has SIMDJSON_PADDING readable bytes behind it.
void read_json(simdjson::dom::parser& parser, std::string_view line, const ReadOptions& options,
    Document& out) {
  Element root, id;
  std::string_view text;
  if (const auto error = parser.parse(line.data(), line.size(), false).get(root)) {
    out.problem = fmt::format("not JSON: {}", simdjson::error_message(error));
    return;
  }
  if (!options.id_field.empty() && !find(root, options.id_field).get(id)) {
    out.id = id.get(text) ? simdjson::minify(id) : std::string(text);
  }
  const auto field = find(root, options.text_field);
  if (field.error()) {
    out.problem = fmt::format("no field \"{}\"", options.text_field);
  } else if (field.value_unsafe().get(text)) {
    out.problem = fmt::format(
        "field \"{}\" is {}, not text", options.text_field, type_name(field.value_unsafe()));
  } else {
    out.text = text;
  }
}

}  // namespace

std::vector<InputFile> list_inputs(
    const std::vector<std::string>& paths, const std::vector<std::string>& endings) {
  std::vector<InputFile> files;
  const auto add = [&](const std::string& path) {
    struct stat info{};
    PITH_CHECK(::stat(path.c_str(), &info) == 0 && ::access(path.c_str(), R_OK) == 0,
        "cannot read {}: {}", path, reason());
    files.push_back({path, static_cast<uint64_t>(info.st_size),
        info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec});
  };
  for (const std::string& pattern : paths) {
    for (const std::string& path : expand(pattern)) {
      if (fs::is_directory(path)) {
        for (const std::string& file : files_below(path, endings)) add(file);
      } else {
        add(path);  // named singly: whatever its ending
      }
    }
  }
  return files;
}

struct InputReader::State {
  std::vector<InputFile> files;
  ReadOptions options;
  InputPosition at;
  std::optional<ByteSource> source;
  std::optional<TableSource> table;
  std::string pending;        // read, not handed out: never a whole line or file
  uint64_t bytes_before = 0;  // in the files before this one

  bool next_rows(Chunk& chunk) {
    if (!table->next(chunk.bytes, chunk.row_sizes)) return false;
    at.line += static_cast<int64_t>(chunk.row_sizes.size());
    at.offset = static_cast<uint64_t>(at.line);
    return true;
  }

  bool next_file(Chunk& chunk) {
    if (at.offset > 0) return false;
    while (pending.size() <= options.max_line && read_more()) {
    }
    chunk.bytes = std::exchange(pending, {});
    if (chunk.bytes.size() > options.max_line) {
      chunk.bytes = {};
      chunk.problem = too_long("this file, one document,", options.max_line);
    }
    at.offset = 1;
    return true;
  }

  bool read_more() {
    const size_t size = pending.size();
    pending.resize(size + kRead);
    const size_t n = source->read(pending.data() + size, kRead);
    pending.resize(size + n);
    return n > 0;
  }

  bool next_lines(Chunk& chunk) {
    size_t end = 0;  // of the last whole line
    while (end == 0 || pending.size() < kChunk) {
      const size_t searched = pending.size();
      if (end == 0 && searched > options.max_line) return skip_line(chunk);
      if (!read_more()) {
        end = searched;
        break;
      }
      const void* newline = ::memrchr(pending.data() + searched, '\n', pending.size() - searched);
      if (newline)
        end = static_cast<size_t>(static_cast<const char*>(newline) - pending.data()) + 1;
    }
    if (end == 0) return false;
    chunk.bytes.reserve(end + simdjson::SIMDJSON_PADDING);
    chunk.bytes.assign(pending, 0, end);
    pending.erase(0, end);
    at.offset += end;
    at.line += std::count(chunk.bytes.begin(), chunk.bytes.end(), '\n');
    return true;
  }

  // Passes over a line that is too long to be held.
  bool skip_line(Chunk& chunk) {
    size_t end;
    while ((end = pending.find('\n')) == pending.npos) {
      at.offset += pending.size();
      pending.clear();
      if (!read_more()) break;
    }
    end = end == pending.npos ? 0 : end + 1;
    at.offset += end;
    pending.erase(0, end);
    ++at.line;
    chunk.problem = too_long("this line", options.max_line);
    return true;
  }
};

InputReader::InputReader(std::vector<InputFile> files, ReadOptions options, InputPosition start)
    : state_(std::make_unique<State>()) {
  state_->files = std::move(files);
  state_->options = std::move(options);
  state_->at = start;
  for (int64_t i = 0; i < start.file; ++i)
    state_->bytes_before += state_->files[static_cast<size_t>(i)].bytes;
}
InputReader::~InputReader() = default;

bool InputReader::next(Chunk& chunk) {
  State& state = *state_;
  while (state.at.file < static_cast<int64_t>(state.files.size())) {
    const InputFile& file = state.files[static_cast<size_t>(state.at.file)];
    chunk = {};
    chunk.layout = layout_of(file.path);
    if (!state.source && !state.table) {
      if (chunk.layout == Layout::kRows) {
        state.table.emplace(file.path, state.options.text_field, state.at.line);
      } else {
        state.source.emplace(file.path);
        if (chunk.layout == Layout::kLines) state.source->skip(state.at.offset);
      }
    }
    chunk.path = file.path;
    chunk.file = state.at.file;
    chunk.line = state.at.line;
    const bool found = chunk.layout == Layout::kLines  ? state.next_lines(chunk)
                       : chunk.layout == Layout::kRows ? state.next_rows(chunk)
                                                       : state.next_file(chunk);
    if (found) {
      chunk.end = state.at;
      chunk.bytes_read = state.bytes_before + (state.source ? state.source->consumed() : 0);
      return true;
    }
    state.source.reset();
    state.table.reset();
    state.at = {state.at.file + 1};
    state.bytes_before += file.bytes;
  }
  return false;
}

std::vector<Document> read_documents(const Chunk& chunk, const ReadOptions& options) {
  std::vector<Document> documents;
  if (chunk.layout == Layout::kWhole || !chunk.problem.empty()) {
    Document& document = documents.emplace_back();
    document.line = chunk.layout == Layout::kWhole ? 0 : chunk.line + 1;
    document.problem = chunk.problem;
    document.is_text = chunk.bytes.find('\0') == std::string::npos &&
                       simdjson::validate_utf8(chunk.bytes.data(), chunk.bytes.size());
    if (document.is_text) document.text = chunk.bytes;
    return documents;
  }
  int64_t line = chunk.line;
  size_t begin = 0;
  if (chunk.layout == Layout::kRows) {
    for (const int64_t size : chunk.row_sizes) {
      Document& document = documents.emplace_back();
      document.line = ++line;
      if (size < 0) document.problem = fmt::format("column \"{}\" is null", options.text_field);
      if (size <= 0) continue;
      document.text = chunk.bytes.substr(begin, static_cast<size_t>(size));
      begin += static_cast<size_t>(size);
      if (document.text.size() > options.max_line) {
        document.problem = too_long("this row", options.max_line);
      } else if (!simdjson::validate_utf8(document.text.data(), document.text.size())) {
        document.problem = "not UTF-8 text";
      }
    }
    return documents;
  }
  std::string bytes = chunk.bytes;
  bytes.reserve(bytes.size() + simdjson::SIMDJSON_PADDING);
  simdjson::dom::parser parser;
  if (line == 0 && bytes.starts_with("\xEF\xBB\xBF")) begin = 3;
  for (size_t end; begin < bytes.size(); begin = end + 1) {
    ++line;
    end = std::min(bytes.find('\n', begin), bytes.size());
    const std::string_view text(bytes.data() + begin, end - begin);
    if (text.find_first_not_of(" \t\r") == text.npos) continue;
    Document& document = documents.emplace_back();
    document.line = line;
    if (text.size() > options.max_line) {
      document.problem = too_long("this line", options.max_line);
    } else {
      read_json(parser, text, options, document);
    }
  }
  return documents;
}

}  // namespace pith
