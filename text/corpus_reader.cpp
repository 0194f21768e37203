#include "text/corpus_reader.h"

#include <dlfcn.h>
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

namespace pith {
namespace {

namespace fs = std::filesystem;
using Layout = Chunk::Layout;

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

Layout layout_of(std::string_view path) {
  if (path.ends_with(".parquet")) return Layout::kRows;
  if (path.ends_with(".gz") || is_zstd(path)) path = path.substr(0, path.rfind('.'));
  const bool lines = path.ends_with(".jsonl") || path.ends_with(".ndjson");
  return lines ? Layout::kLines : Layout::kWhole;
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
    return static_cast<size_t>(n);
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

// `line` has SIMDJSON_PADDING readable bytes behind it.
void read_json(simdjson::dom::parser& parser, std::string_view line, const ReadOptions& options,
    Document& out) {
  Element root, id, field;
  std::string_view text;
  if (const auto error = parser.parse(line.data(), line.size(), false).get(root)) {
    out.problem = fmt::format("not JSON: {}", simdjson::error_message(error));
    return;
  }
  if (!options.id_field.empty() && !find(root, options.id_field).get(id))
    out.id = id.get(text) ? simdjson::minify(id) : std::string(text);
  if (find(root, options.text_field).get(field))
    out.problem = fmt::format("no field \"{}\"", options.text_field);
  else if (const std::string& name = options.text_field; field.get(text))
    out.problem = fmt::format("field \"{}\" is {:.40}, not text", name, simdjson::minify(field));
  else
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

struct InputReader::State {
  std::vector<InputFile> files;
  ReadOptions options;
  InputPosition at;
  std::optional<ByteSource> source = {};
  std::shared_ptr<void> table = {};  // of the Parquet plugin
  std::string pending = {};          // read, not handed out: never a whole line or file
  uint64_t bytes_before = 0;         // in the files before this one

  void open(const std::string& path, Layout layout) {
    if (layout == Layout::kRows) {
      std::string error;
      const char* column = options.text_field.c_str();
      table.reset(parquet().open(path.c_str(), column, at.line, error), parquet().close);
      PITH_CHECK(table, "{}: {}", path, error);
    } else {
      source.emplace(path);
      if (layout == Layout::kLines) source->skip(at.offset);
    }
  }

  bool next_rows(Chunk& chunk) {
    std::string error;
    const bool found = parquet().next(table.get(), chunk.bytes, chunk.row_sizes, error);
    PITH_CHECK(error.empty(), "{}: {}", chunk.path, error);
    at.line += static_cast<int64_t>(chunk.row_sizes.size());
    at.offset = static_cast<uint64_t>(at.line);
    return found;
  }

  bool next_file(Chunk& chunk) {
    if (at.offset > 0) return false;
    while (pending.size() <= options.max_line && read_more()) {}
    chunk.bytes = std::exchange(pending, {});
    if (chunk.bytes.size() > options.max_line) {
      chunk.problem = too_long("this file, one document,", options.max_line);
      chunk.bytes = {};
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
      const size_t newline = std::string_view(pending).substr(searched).rfind('\n');
      if (newline != pending.npos) end = searched + newline + 1;
    }
    if (end == 0) return false;
    chunk.bytes.reserve(end + simdjson::SIMDJSON_PADDING);
    chunk.bytes.assign(pending, 0, end);
    pending.erase(0, end);
    at.offset += end;
    at.line += std::ranges::count(chunk.bytes, '\n');
    return true;
  }

  // Passes over a line that is too long to be held: all of `pending`, and more.
  bool skip_line(Chunk& chunk) {
    size_t end = 0;
    while (end == 0) {
      at.offset += pending.size();
      pending.clear();
      if (!read_more()) break;
      end = pending.find('\n') + 1;
    }
    at.offset += end;
    pending.erase(0, end);
    ++at.line;
    chunk.problem = too_long("this line", options.max_line);
    return true;
  }

  bool next(Chunk& chunk) {
    for (; at.file < std::ssize(files); at = {at.file + 1}) {
      const InputFile& file = files[static_cast<size_t>(at.file)];
      chunk = {};
      chunk.layout = layout_of(file.path);
      if (!source && !table) open(file.path, chunk.layout);
      chunk.path = file.path;
      chunk.line = at.line;
      if (chunk.layout == Layout::kLines  ? next_lines(chunk)
          : chunk.layout == Layout::kRows ? next_rows(chunk)
                                          : next_file(chunk)) {
        chunk.end = at;
        chunk.bytes_read = bytes_before + (source ? source->consumed() : 0);
        return true;
      }
      source.reset();
      table.reset();
      bytes_before += file.bytes;
    }
    return false;
  }
};

InputReader::InputReader(std::vector<InputFile> files, ReadOptions options, InputPosition start)
    : state_(new State{std::move(files), std::move(options), start}) {
  for (int64_t i = 0; i < start.file; ++i)
    state_->bytes_before += state_->files[static_cast<size_t>(i)].bytes;
}
InputReader::~InputReader() = default;

bool InputReader::next(Chunk& chunk) { return state_->next(chunk); }

std::vector<Document> read_documents(const Chunk& chunk, const ReadOptions& options) {
  std::vector<Document> documents;
  int64_t line = chunk.line;
  const auto add = [&]() -> Document& {
    documents.emplace_back().line = line;
    return documents.back();
  };
  const auto is_utf8 = [](std::string_view text) {
    return simdjson::validate_utf8(text.data(), text.size());
  };
  if (chunk.layout == Layout::kWhole || !chunk.problem.empty()) {
    line += chunk.layout == Layout::kWhole ? 0 : 1;
    Document& document = add();
    document.problem = chunk.problem;
    document.is_text = chunk.bytes.find('\0') == std::string::npos && is_utf8(chunk.bytes);
    if (document.is_text) document.text = chunk.bytes;
    return documents;
  }
  size_t begin = 0;
  if (chunk.layout == Layout::kRows) {
    for (const int64_t size : chunk.row_sizes) {
      ++line;
      Document& document = add();
      if (size < 0) document.problem = fmt::format("column \"{}\" is null", options.text_field);
      if (size <= 0) continue;
      document.text = chunk.bytes.substr(begin, static_cast<size_t>(size));
      begin += static_cast<size_t>(size);
      if (document.text.size() > options.max_line)
        document.problem = too_long("this row", options.max_line);
      else if (!is_utf8(document.text))
        document.problem = "not UTF-8 text";
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
    if (text.size() > options.max_line)
      add().problem = too_long("this line", options.max_line);
    else
      read_json(parser, text, options, add());
  }
  return documents;
}

}  // namespace pith
