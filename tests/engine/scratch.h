// A temporary folder with a name that breaks careless quoting, and the damages that tests do to
// files.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include "core/error.h"
#include "engine/file_io.h"

namespace pith {
struct Scratch {
  std::filesystem::path path;
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "ü b'$HOME-XXXXXX").string();
    path = ::mkdtemp(name.data());
  }
  ~Scratch() { std::filesystem::remove_all(path); }
  std::filesystem::path operator/(const std::string& name) const { return path / name; }
};

inline void put_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// The message of the pith::Error that `action` throws; fails the test when there is none.
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) { return error.message(); }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

#define EXPECT_ERROR(statement, ...) \
  do { \
    const std::string text_ = ::pith::error_of([&] { statement; }); \
    for (const std::string& part_: std::initializer_list<std::string>{__VA_ARGS__}) \
      EXPECT_NE(text_.find(part_), std::string::npos) << part_ << "\nnot in: " << text_; \
  } while (false)

} // namespace pith
