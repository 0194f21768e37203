// The text of the pith::Error that a call throws. Provides error_text.
#pragma once
#include <functional>
#include <string>
#include "core/error.h"

namespace pith::test {

// what() of the pith::Error thrown by f, or "no error".
inline std::string error_text(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) { return error.what(); }
  return "no error";
}

// Whether `part` occurs in `text`.
inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

} // namespace pith::test
