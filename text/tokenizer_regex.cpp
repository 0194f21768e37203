#include "text/tokenizer_state.h"

namespace pith {
namespace {
// What \w holds in Oniguruma, as members of a class.
constexpr string_view kOnigurumaWord =
  "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}\\x{24B6}-\\x{24E9}"
  "\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}";

bool is_one_of(char c, string_view set) { return set.find(c) != set.npos; }

// The constructs that are supported, apart from words and classes.
struct Grammar {
  static Regex rule(string_view pattern) {
    return Regex(fmt::format("\\G(?:{})", pattern), Regex::Syntax::kPcre2);
  }
  Regex syntax = rule(R"(\(\?(?:[:=!>]|<[=!]|i:)|\((?![?*])|[)*+?.|^$]|\\[Az])");
  Regex set = rule(R"(\\[dDsS]|\\[pP]\{\^?(?:L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|)"
                   R"(Z[slp]?|C[cfo])\})");
  Regex interval = rule(R"(\{(?:[0-9]+,?[0-9]*|,[0-9]+)\})");
  Regex point = rule(R"(\\u[0-9A-Fa-f]{4}|\\x(?:[0-9A-Fa-f]{2}|\{[0-9A-Fa-f]+\})|\\[nrtfvae])"
                     R"(|\\[^A-Za-z0-9]|[^\\])");
};

// Rewrites a pattern of Oniguruma into PCRE2's syntax, one construct at a time, or refuses it. What
// is an error in both is left to PCRE2.
class Translator {
 public:
  explicit Translator(string_view pattern) : pattern_(pattern) {}

  string run() {
    PITH_CHECK(utf8_valid_prefix(pattern_) == pattern_.size(), "regex is not UTF-8");
    take("(?i)"); // behind the beginning it binds otherwise in Oniguruma
    while (at_ < pattern_.size()) {
      const char c = peek();
      const size_t start = out_.size();
      if (interval()) continue;
      if (c == '(') {
        groups_.push_back(start);
      } else if (c == ')' && !groups_.empty()) {
        atom_ = groups_.back();
        groups_.pop_back();
      } else if (!is_one_of(c, "*+?")) {
        atom_ = start;
      }
      if (c == '[') character_class();
      else if (next(grammar().syntax) || next(grammar().set)) out_ += token_;
      else if (!word()) range(point("("), nullopt);
    }
    return std::move(out_);
  }
 private:
  static const Grammar& grammar() {
    static const Grammar grammar;
    return grammar;
  }
  [[noreturn]] void refuse(string_view construct) const {
    PITH_FAIL("regex construct {} is not supported, in {}", construct, pattern_);
  }
  char peek(size_t ahead = 0) const {
    return at_ + ahead < pattern_.size() ? pattern_[at_ + ahead] : '\0';
  }
  // Reads what a rule matches here into token_.
  bool next(const Regex& rule) {
    size_t begin = 0, end = 0;
    if (!rule.find(pattern_, at_, begin, end)) return false;
    token_ = pattern_.substr(at_, end - at_);
    at_ = end;
    return true;
  }
  // Reads `text` if it is next, and writes it or what PCRE2 has for it.
  bool take(string_view text, string_view pcre2) {
    if (!pattern_.substr(at_).starts_with(text)) return false;
    at_ += text.size();
    out_ += pcre2;
    return true;
  }
  bool take(string_view text) { return take(text, text); }

  bool word() {
    constexpr string_view kBorder = "(?:(?<=[{0}])(?{1}[{0}])|(?<![{0}])(?{2}[{0}]))";
    return take("\\w", fmt::format("[{}]", kOnigurumaWord)) ||
      take("\\W", fmt::format("[^{}]", kOnigurumaWord)) ||
      take("\\b", fmt::format(kBorder, kOnigurumaWord, '!', '=')) ||
      take("\\B", fmt::format(kBorder, kOnigurumaWord, '=', '!')) || take("\\h", "[0-9A-Fa-f]");
  }

  void character_class() {
    take("[");
    take("^");
    for (bool first = true; at_ < pattern_.size() && (first || peek() != ']'); first = false) {
      if (peek() == '&' && peek(1) == '&') refuse("&&");
      if (take("\\w", kOnigurumaWord) || take("\\h", "0-9A-Fa-f")) continue;
      if (next(grammar().set)) {
        out_ += token_;
        continue;
      }
      const char32_t code = point("[");
      const bool is_range = peek() == '-' && peek(1) != ']' && peek(1) != '\0';
      at_ += is_range;
      range(code, is_range ? optional(point("[")) : nullopt);
    }
    take("]");
  }

  // Code points that stand for themselves. A stand-in would hide one from the pattern.
  void range(char32_t first, optional<char32_t> last) {
    const uint32_t from = first, to = last.value_or(first);
    PITH_CHECK(unicode_stand_ins_respect(from, to),
      "regex {}: U+{:04X}-U+{:04X} cuts code points younger than Unicode 14", pattern_, from, to);
    out_ += fmt::format("\\x{{{:X}}}", from);
    if (last) out_ += fmt::format("-\\x{{{:X}}}", to);
  }

  // The code point of a character, none of `but`, or of an escape of one.
  char32_t point(string_view but) {
    if (is_one_of(peek(), but) || !next(grammar().point)) refuse(pattern_.substr(at_, 8));
    constexpr string_view kLetters = "nrtfvae", kCodes = "\n\r\t\f\v\a\x1B";
    size_t at = token_.size() > 1 && token_[0] == '\\' ? 1 : 0;
    const size_t letter = at == 1 ? kLetters.find(token_[1]) : kLetters.npos;
    if (letter != kLetters.npos) return char32_t(kCodes[letter]);
    if (at == 0 || !is_one_of(token_[1], "ux")) return utf8_next(token_, at);
    uint32_t code = 0;
    const char* const digits = token_.data() + (token_[2] == '{' ? 3 : 2);
    const auto read = from_chars(digits, token_.data() + token_.size(), code, 16);
    if (read.ec != std::errc()) refuse(token_);
    return code;
  }

  // {n}, {n,}, {,n} or {n,m}; another brace stands for itself.
  bool interval() {
    if (!next(grammar().interval)) return false;
    out_ += fmt::format("{{{}{}", token_[1] == ',' ? "0" : "", token_.substr(1));
    if (peek() == '?' && token_.find(',') == token_.npos) refuse("{n}?");
    if (peek() == '+') { // not possessive in Oniguruma: the interval is repeated
      out_.insert(atom_, "(?:");
      out_ += ')';
    }
    return true;
  }

  const string_view pattern_;
  string out_;
  string_view token_;
  size_t at_ = 0;
  size_t atom_ = 0; // where the last repeatable construct starts in out_
  vector<size_t> groups_; // where each open group starts in out_
};

string pcre2_message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

struct Scratch { // what a thread needs to match
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(64 << 10, 64 << 20, nullptr);
  Scratch() {
    PITH_CHECK(data && context && stack, "out of memory for regular expressions");
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Scratch() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
};
}

Regex::Regex(string_view pattern, Syntax syntax) : stand_ins_(syntax == Syntax::kOniguruma) {
  const string text = "(*LF)" + (stand_ins_ ? Translator(pattern).run() : string(pattern));
  int error = 0;
  size_t place = 0;
  const uint32_t options = // ^ and $ match at every line in Oniguruma
    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_MULTILINE;
  code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), options, &error,
                &place, nullptr),
    pcre2_code_free);
  PITH_CHECK(code_, "regex {}: {} at byte {} of its translation {}", pattern, pcre2_message(error),
    place, text);
  jit_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

Regex Regex::literal(string text) {
  Regex made;
  made.literal_ = std::move(text);
  return made;
}

bool Regex::find(string_view text, size_t from, size_t& begin, size_t& end) const {
  if (!code_) {
    begin = text.find(literal_, from);
    end = begin + literal_.size();
    return begin != text.npos;
  }
  thread_local const Scratch scratch;
  const int found =
    (jit_ ? pcre2_jit_match : pcre2_match)(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
      text.size(), from, jit_ ? 0 : PCRE2_NO_UTF_CHECK, scratch.data, scratch.context);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  PITH_CHECK(found >= 0, "regular expression failed on a text of {} bytes: {}", text.size(),
    pcre2_message(found));
  begin = pcre2_get_ovector_pointer(scratch.data)[0];
  end = pcre2_get_ovector_pointer(scratch.data)[1];
  return true;
}
}
