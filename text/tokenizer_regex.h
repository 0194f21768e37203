// The regular expressions of tokenizer files, run by PCRE2's JIT.
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <memory>
#include <string>
#include <string_view>

namespace pith {

// What one thread needs to match. Shared by all regexes of a tokenizer.
class RegexScratch {
 public:
  RegexScratch();

 private:
  friend class Regex;
  std::shared_ptr<pcre2_match_data> data_;
  std::shared_ptr<pcre2_match_context> context_;
  std::shared_ptr<pcre2_jit_stack> stack_;
};

class Regex {
 public:
  // tokenizer.json is written for Oniguruma, .tiktoken patterns for Rust's fancy-regex.
  enum class Dialect { kOniguruma, kRust };
  // Constructs that PCRE2 would read otherwise are translated, or refused by name.
  explicit Regex(std::string_view pattern, Dialect dialect = Dialect::kOniguruma);
  // Matches this text and nothing else.
  static Regex literal(std::string_view text);

  // The first match at or behind `from`. `subject` is UTF-8 with stand-ins (unicode_substitute).
  bool find(std::string_view subject, size_t from, RegexScratch& scratch, size_t& begin,
      size_t& end) const;
  // The translation, for tests and messages.
  static std::string translate(std::string_view pattern, Dialect dialect);

 private:
  std::shared_ptr<pcre2_code> code_;
  bool jit_ = false;
};

}  // namespace pith
