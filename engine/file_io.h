// Files as this room uses them: mapped for reading, summed while written, durable when closed.
#pragma once
#include <xxhash.h>
#include <nlohmann/json_fwd.hpp>

namespace pith {
// The message of what `part` throws; empty where it throws nothing.
template <class Part> string problem_of(const Part& part) {
  try {
    part();
    return "";
  } catch (const Error& error) { return error.message(); } catch (const exception& error) {
    return error.what();
  }
}

// A whole file, read-only; the pages stay mapped while any copy lives.
struct MappedFile {
  shared_ptr<const char> data;
  uint64_t size = 0;
  string_view bytes() const { return {data.get(), size}; }
};
MappedFile map_file(const fs::path& path);

inline string read_file(const fs::path& path) { return string(map_file(path).bytes()); }

// A file being written, behind the first `keep` bytes of what is there. Every failure names the
// path and the system's reason.
class OutputFile {
 public:
  explicit OutputFile(fs::path path, uint64_t keep = 0);
  void append(string_view bytes);
  uint64_t bytes() const { return bytes_; } // appended
  const fs::path& path() const { return path_; }
  void flush();
  void sync(); // makes them durable
  string close(); // makes it durable; returns the xxh3 of all bytes appended
 private:
  fs::path path_;
  unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> sum_;
  uint64_t bytes_ = 0;
};

// Name, size and sum of a file; for safetensors also the sum of each tensor's bytes.
struct WrittenFile {
  string name; // relative to its folder
  uint64_t bytes = 0;
  string xxh3;
  map<string, string> tensors;
};
WrittenFile write_file(const fs::path& folder, const string& name, string_view bytes);

// JSON of a file, or of text that came from `source`; errors name file, line and column. A key that
// stands twice in one object is one too: readers disagree about which counts.
nlohmann::json read_json(const fs::path& path);
nlohmann::json parse_json(string_view text, const string& source);

// A JSON value as a T, if nothing is lost: no other types, no fractions, no further members.
template <class T, class Json> optional<T> exactly(const Json& value) {
  try {
    T typed = value.template get<T>();
    if (Json(typed).dump() == value.dump()) return typed;
  } catch (const typename Json::exception&) {}
  return nullopt;
}

// Names of what is in a folder, sorted; nothing where there is none.
vector<string> names_in(const fs::path& folder);
// Makes creations, renames and deletions inside a folder durable.
void sync_folder(const fs::path& folder);

// Bytes of a number as files hold them; element i of an array of such, aligned or not.
static_assert(std::endian::native == std::endian::little);
template <class T> string raw(T number) {
  return {reinterpret_cast<const char*>(&number), sizeof(T)};
}
template <class T> T load(const char* array, int64_t i = 0) {
  T number;
  std::memcpy(&number, array + i * int64_t(sizeof(T)), sizeof(T));
  return number;
}

inline string hex(uint64_t value) { return fmt::format("{:016x}", value); }
inline string xxh3(string_view bytes) { // the 64-bit sum, as 16 digits
  return hex(XXH3_64bits(bytes.data(), bytes.size()));
}

// A JSON object (text from dump) with the xxh3 of its own bytes as its last member, which
// check_seal compares.
string seal_json(const string& object);
void check_seal(string_view text, const string& source);
}
