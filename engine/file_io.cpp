#include "engine/file_io.h"
#include <sys/mman.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

namespace pith {
namespace {
using File = unique_ptr<std::FILE, int (*)(std::FILE*)>;

[[noreturn]] void fail(const fs::path& path, const char* action) {
  const bool full = errno == ENOSPC || errno == EDQUOT;
  PITH_FAIL_HINT(full ? "free space on that disk or choose another folder" : "", "cannot {} {}: {}",
    action, path, std::generic_category().message(errno));
}

File open(const fs::path& path, const char* mode) {
  File file(std::fopen(path.c_str(), mode), &std::fclose);
  if (!file) fail(path, *mode == 'w' ? "create" : "open");
  return file;
}

// The member that seal_json appends: fixed length, so that its place is known without parsing.
string seal_of(string_view body) { return fmt::format(" \"checksum\": \"{}\"\n}}\n", xxh3(body)); }
}

MappedFile map_file(const fs::path& path) {
  PITH_CHECK(!fs::exists(path) || fs::is_regular_file(path), "{} is not a file", path);
  const File file = open(path, "re");
  const uint64_t size = fs::file_size(path);
  if (size == 0) return {make_shared<char>(), 0};
  void* pages = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, ::fileno(file.get()), 0);
  if (pages == MAP_FAILED) fail(path, "map");
  return {shared_ptr<const char>(
            static_cast<const char*>(pages), [pages, size](const char*) { ::munmap(pages, size); }),
    size};
}

OutputFile::OutputFile(fs::path path, uint64_t keep)
    : path_(std::move(path)), file_(open(path_, keep > 0 ? "r+be" : "wbe")),
      sum_(XXH3_createState(), &XXH3_freeState) {
  if (keep > 0) {
    const uint64_t size = fs::file_size(path_);
    PITH_CHECK(
      size >= keep, "{} has {} bytes, fewer than the {} that were written", path_, size, keep);
    if (::ftruncate(::fileno(file_.get()), off_t(keep)) != 0 ||
      std::fseek(file_.get(), 0, SEEK_END) != 0)
      fail(path_, "cut");
  }
  XXH3_64bits_reset(sum_.get());
}

void OutputFile::append(string_view bytes) {
  if (bytes.empty()) return; // its data may be null
  XXH3_64bits_update(sum_.get(), bytes.data(), bytes.size());
  bytes_ += bytes.size();
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size()) fail(path_, "write");
}

void OutputFile::flush() {
  if (std::fflush(file_.get()) != 0) fail(path_, "write");
}

void OutputFile::sync() {
  flush();
  // Some devices can't be synced (EINVAL: a pipe, /dev/stdout); they hold nothing to lose.
  if (::fsync(::fileno(file_.get())) != 0 && errno != EINVAL) fail(path_, "sync");
}

string OutputFile::close() {
  sync();
  if (std::fclose(file_.release()) != 0) fail(path_, "close");
  return hex(XXH3_64bits_digest(sum_.get()));
}

nlohmann::json parse_json(string_view text, const string& source) {
  using nlohmann::json;
  using Event = json::parse_event_t;
  vector<set<string>> keys; // of the objects that are open
  const auto check = [&](int depth, Event event, json& parsed) {
    PITH_CHECK(depth < 64, "{}: values inside each other, more than 64 deep", source);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key)
      PITH_CHECK(keys.back().insert(parsed.get_ref<const string&>()).second,
        "{}: key {} stands twice in one object", source, parsed.dump());
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& error) {
    const string_view what = error.what(); // "[json.exception.NAME.NUMBER] what and where"
    PITH_FAIL("{}: not JSON: {:.300}", source, what.substr(what.find("] ") + 2));
  }
}

nlohmann::json read_json(const fs::path& path) {
  return parse_json(map_file(path).bytes(), path.string());
}

WrittenFile write_file(const fs::path& folder, const string& name, string_view bytes) {
  OutputFile out(folder / name);
  out.append(bytes);
  return {name, bytes.size(), out.close(), {}};
}

vector<string> names_in(const fs::path& folder) {
  vector<string> names;
  if (fs::is_directory(folder))
    for (const auto& entry: fs::directory_iterator(folder))
      names.push_back(entry.path().filename().string());
  ranges::sort(names);
  return names;
}

void sync_folder(const fs::path& folder) {
  const File file = open(folder, "re");
  if (::fsync(::fileno(file.get())) != 0 && errno != EINVAL) fail(folder, "sync");
}

string seal_json(const string& object) {
  string body = object.substr(0, object.find_last_of('}'));
  body.erase(body.find_last_not_of(" \n") + 1);
  body += ",\n";
  return body + seal_of(body);
}

void check_seal(string_view text, const string& source) {
  const size_t length = seal_of("").size();
  PITH_CHECK(text.size() > length &&
      text.substr(text.size() - length) == seal_of(text.substr(0, text.size() - length)),
    "{} is damaged: its bytes do not match the checksum on its last line", source);
}
}
