#include "core/error.h"

namespace pith {
namespace {
string& error_context() {
  static string context;
  return context;
}

string what_text(
  const char* file, int line, string_view statement, const string& message, string_view hint) {
  string_view name = file; // paths start at the room, whatever folder the build ran in
  for (string_view room: {"core/", "operators/", "models/", "engine/", "text/", "apps/"})
    if (const size_t at = name.rfind(room); at != name.npos) name.remove_prefix(at);
  string text = message;
  if (!hint.empty()) text += fmt::format("\n  hint: {}", hint);
  text += fmt::format("\n  at {}:{}", name, line);
  if (!statement.empty()) text += fmt::format(": {}", statement);
  if (!error_context().empty()) text += fmt::format(" [{}]", error_context());
  return text;
}
}

Error::Error(
  const char* file, int line, string_view statement, const string& message, string_view hint)
    : std::runtime_error(what_text(file, line, statement, message, hint)), message_(message) {}

void set_error_context(string context) { error_context() = std::move(context); }
}
