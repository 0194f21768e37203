// Text on its way to the model, and where each byte of it came from.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace pith {

// A view of well-formed UTF-8. Without `origin` it is the input itself from byte `base` on.
struct Text {
  std::string_view text;
  std::string_view subject;           // what regexes match: text with stand-ins, same length
  const TokenSpan* origin = nullptr;  // input bytes behind each byte of text
  uint32_t base = 0;
  bool at_start = false;  // begins where the input begins

  Text slice(size_t begin, size_t end) const;
  // Input bytes of text[begin, end), grown to whole characters.
  TokenSpan origin_of(size_t begin, size_t end) const;
};

// A character of changed text and how the old text moved on: +1 the character is new and shares the
// place of the old character before it; 0 it stands for one old character; -n for one and the n
// after it.
struct Change {
  char32_t code;
  int moved;
};

// Builds a changed copy of a Text from left to right. Places are kept only when `track` is set.
class Rewriter {
 public:
  Rewriter(const Text& from, bool track) : from_(from), track_(track) {}
  // Replaces bytes [begin, end), which lie behind all replaced before. Dropped characters that
  // stand before the first change are counted in bytes by `skipped`.
  void replace(size_t begin, size_t end, std::span<const Change> changes, size_t skipped = 0);
  // Puts new text before everything, at the place of the first character.
  void prepend(std::string_view text);
  bool changed() const { return changed_; }
  Text finish();  // copies the rest; the result views this object

  std::string text;
  std::vector<TokenSpan> origin;

 private:
  void copy(size_t end);
  const Text from_;
  const bool track_;
  bool changed_ = false;
  size_t copied_ = 0;
};

}  // namespace pith
