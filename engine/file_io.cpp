#include "engine/file_io.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/error.h"

namespace pith {
namespace {

std::string reason() { return std::generic_category().message(errno); }

[[noreturn]] void fail_write(const std::filesystem::path& path, const char* action) {
  const bool full = errno == ENOSPC || errno == EDQUOT;
  PITH_FAIL_HINT(full ? "free space on that disk or choose another folder" : "", "cannot {} {}: {}",
      action, path.string(), reason());
}

struct Descriptor {
  int value;
  explicit Descriptor(const std::filesystem::path& path, int flags)
      : value(::open(path.c_str(), flags | O_CLOEXEC)) {
    PITH_CHECK(value >= 0, "cannot open {}: {}", path.string(), reason());
  }
  ~Descriptor() { ::close(value); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};

// The member that seal_json appends: fixed length, so that its place is known without parsing.
std::string seal_of(std::string_view body) {
  return fmt::format(" \"checksum\": \"{}\"\n}}\n", hex(xxh3(body)));
}

}  // namespace

MappedFile map_file(const std::filesystem::path& path) {
  Descriptor file(path, O_RDONLY);
  struct stat info{};
  PITH_CHECK(::fstat(file.value, &info) == 0, "cannot stat {}: {}", path.string(), reason());
  PITH_CHECK(S_ISREG(info.st_mode), "{} is not a file", path.string());
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size == 0) return {std::shared_ptr<const char>(std::make_shared<char>()), 0};
  void* pages = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.value, 0);
  PITH_CHECK(pages != MAP_FAILED, "cannot map {} ({} bytes): {}", path.string(), size, reason());
  return {std::shared_ptr<const char>(static_cast<const char*>(pages),
              [pages, size](const char*) { ::munmap(pages, size); }),
      size};
}

std::string read_file(const std::filesystem::path& path) {
  return std::string(map_file(path).bytes());
}

OutputFile::OutputFile(std::filesystem::path path)
    : path_(std::move(path)),
      file_(std::fopen(path_.c_str(), "wbe"), &std::fclose),
      sum_(XXH3_createState(), &XXH3_freeState) {
  if (!file_) fail_write(path_, "create");
  XXH3_64bits_reset(sum_.get());
}

void OutputFile::append(std::string_view bytes) {
  XXH3_64bits_update(sum_.get(), bytes.data(), bytes.size());
  bytes_ += bytes.size();
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size())
    fail_write(path_, "write");
}

uint64_t OutputFile::close() {
  if (std::fflush(file_.get()) != 0) fail_write(path_, "write");
  // Some devices can't be synced (EINVAL: a pipe, /dev/stdout); they hold nothing to lose.
  if (::fsync(::fileno(file_.get())) != 0 && errno != EINVAL) fail_write(path_, "sync");
  if (std::fclose(file_.release()) != 0) fail_write(path_, "close");
  return XXH3_64bits_digest(sum_.get());
}

nlohmann::json parse_json(std::string_view text, const std::string& source) {
  using nlohmann::json;
  using Event = json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto check = [&](int depth, Event event, json& parsed) {
    PITH_CHECK(depth < 64, "{}: values inside each other, more than 64 deep", source);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key)
      PITH_CHECK(keys.back().insert(parsed.get_ref<const std::string&>()).second,
          "{}: key {} stands twice in one object", source, parsed.dump());
    return true;
  };
  // The library's messages begin "[json.exception.parse_error.101] parse error at line L, ...: ".
  const auto after = [](const json::exception& error, std::string_view mark) {
    std::string_view what = error.what();
    return what.substr(what.find(mark) + mark.size());
  };
  try {
    return json::parse(text, check);
  } catch (const json::parse_error& error) {
    const auto before = text.substr(0, std::min(text.size(), error.byte > 0 ? error.byte - 1 : 0));
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const size_t column = before.size() - (before.rfind('\n') + 1) + 1;  // npos + 1 = 0
    PITH_FAIL("{}:{}:{}: not JSON: {:.300}", source, line, column, after(error, ": "));
  } catch (const json::exception& error) {  // a number out of range
    PITH_FAIL("{}: not JSON: {:.300}", source, after(error, "] "));
  }
}

nlohmann::json read_json(const std::filesystem::path& path) {
  return parse_json(map_file(path).bytes(), path.string());
}

WrittenFile write_file(
    const std::filesystem::path& folder, const std::string& name, std::string_view bytes) {
  OutputFile out(folder / name);
  out.append(bytes);
  return {name, bytes.size(), out.close(), {}};
}

void sync_folder(const std::filesystem::path& folder) {
  Descriptor descriptor(folder, O_RDONLY | O_DIRECTORY);
  if (::fsync(descriptor.value) != 0 && errno != EINVAL) fail_write(folder, "sync");
}

uint64_t xxh3(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string hex(uint64_t value) { return fmt::format("{:016x}", value); }

std::string seal_json(const std::string& object) {
  std::string body = object.substr(0, object.find_last_of('}'));
  body.erase(body.find_last_not_of(" \n") + 1);
  body += ",\n";
  return body + seal_of(body);
}

void check_seal(std::string_view text, const std::string& source) {
  const size_t length = seal_of("").size();
  PITH_CHECK(text.size() > length &&
                 text.substr(text.size() - length) == seal_of(text.substr(0, text.size() - length)),
      "{} is damaged: its bytes do not match the checksum on its last line", source);
}

}  // namespace pith
