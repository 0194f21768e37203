#include "core/error.h"

#include <utility>

namespace pith {
namespace {

std::string& error_context() {
  static std::string context;
  return context;
}

std::string assemble(
    const std::string& message, const std::string& where, const std::string& hint) {
  std::string text = message;
  if (!hint.empty()) text += "\n  hint: " + hint;
  return text + "\n  at " + where;
}

std::string locate(const char* file, int line, std::string_view statement) {
  std::string_view name = file;  // paths start at the room, whatever folder the build ran in
  for (std::string_view room : {"core/", "operators/", "models/", "engine/", "text/", "apps/"}) {
    if (auto at = name.rfind(room); at != std::string_view::npos) name.remove_prefix(at);
  }
  std::string where = fmt::format("{}:{}", name, line);
  if (!statement.empty()) where += fmt::format(": {}", statement);
  if (!error_context().empty()) where += fmt::format(" [{}]", error_context());
  return where;
}

}  // namespace

Error::Error(const char* file, int line, std::string_view statement, std::string message)
    : Error(std::move(message), locate(file, line, statement), "") {}

Error::Error(std::string message, std::string where, std::string hint)
    : std::runtime_error(assemble(message, where, hint)),
      message_(std::move(message)),
      where_(std::move(where)),
      hint_(std::move(hint)) {}

Error Error::hint(std::string_view text) const {
  return Error(
      message_, where_, hint_.empty() ? std::string(text) : hint_ + "; " + std::string(text));
}

void set_error_context(std::string context) { error_context() = std::move(context); }

}  // namespace pith
