// The one error layer: what failed, where, what to do next.
#pragma once

namespace pith {
// Wrong input and faults of the program alike. what(): message, hint, file:line, statement, rank;
// apps/main.cpp prints it and exits with 1.
class Error : public std::runtime_error {
 public:
  Error(const char* file, int line, string_view statement, const string& message,
    string_view hint = "");
  const string& message() const { return message_; }
 private:
  string message_;
};

// Names this process in later errors: "rank 3 (pp 0, dp 1, cp 1)". Empty for one process.
void set_error_context(string context);
}

// PITH_FAIL("corpus {}: document {} ends at byte {}", path, i, end): throws pith::Error.
#define PITH_FAIL(...) throw ::pith::Error(__FILE__, __LINE__, "", ::fmt::format(__VA_ARGS__))
// PITH_FAIL_HINT("what to do next", "message {}", ...)
#define PITH_FAIL_HINT(advice, ...) \
  throw ::pith::Error(__FILE__, __LINE__, "", ::fmt::format(__VA_ARGS__), advice)
// PITH_CHECK(a == b, "rows {} differ from {}", a, b): throws unless it holds.
#define PITH_CHECK(condition, ...) \
  do { \
    if (!(condition)) [[unlikely]] \
      throw ::pith::Error(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__)); \
  } while (false)
