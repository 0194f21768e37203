// The regular expressions of tokenizer files, run by PCRE2's JIT.
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "text/unicode.h"

namespace pith {

class Regex {
 public:
  // tokenizer.json is written for Oniguruma, .tiktoken for Rust's fancy-regex: what PCRE2 would
  // read otherwise is translated or refused by name, and text is seen with stand-ins. kPcre2, for
  // this program's own tables, sees it as it is.
  enum class Dialect { kOniguruma, kRust, kPcre2 };
  explicit Regex(std::string_view pattern, Dialect dialect = Dialect::kOniguruma);
  static Regex literal(std::string text);  // matches this text, which is not empty, alone

  // Calls match(begin, end) for every match in well-formed UTF-8, from left to right.
  template <class Match>
  void for_each_match(std::string_view text, Match match) const {
    std::string substitute;
    if (stand_ins_ && unicode_substitute(text, substitute)) text = substitute;
    size_t from = 0, begin = 0, end = 0, last = SIZE_MAX;
    while (from <= text.size() && find(text, from, begin, end)) {
      const bool empty = begin == end;
      if (!(empty && begin == last)) match(begin, end);  // an empty match never follows a match
      last = from = end;
      if (!empty) continue;
      do ++from;
      while (from < text.size() && utf8_continues(text[from]));
    }
  }
  // The first match from a place on; `text` is seen as it is.
  bool find(std::string_view text, size_t from, size_t& begin, size_t& end) const;
 private:
  Regex() = default;
  std::string literal_;  // instead of code_
  std::shared_ptr<pcre2_code> code_;
  bool jit_ = false, stand_ins_ = false;
};

}  // namespace pith
