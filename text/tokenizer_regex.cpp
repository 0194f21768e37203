#include "text/tokenizer_regex.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <vector>

#include "core/error.h"

namespace pith {
namespace {

// What \w holds in Oniguruma, as members of a class.
constexpr std::string_view kOnigurumaWord =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}\\x{24B6}-\\x{24E9}"
    "\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}";

constexpr std::string_view kCategories =
    " L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp Cc Cf"
    " Co ";

bool is_one_of(char c, std::string_view set) { return set.find(c) != set.npos; }

// Rewrites a pattern into PCRE2's syntax, one construct at a time, or refuses it.
class Translator {
 public:
  Translator(std::string_view pattern, bool rust) : pattern_(pattern), rust_(rust) {}

  std::string run() {
    PITH_CHECK(utf8_valid_prefix(pattern_) == pattern_.size(), "regex is not UTF-8");
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      const size_t start = out_.size();
      if (c == '(') {
        groups_.push_back(start);
        open_group();
      } else if (is_one_of(c, "*+?")) {
        take();
      } else if (c != '{' || !interval()) {
        atom_ = start;
        if (c == ')') {
          PITH_CHECK(!groups_.empty(), "regex {}: ) without (", pattern_);
          atom_ = groups_.back();
          groups_.pop_back();
          take();
        } else if (c == '[') {
          character_class();
        } else if (is_one_of(c, ".|^$")) {
          take();
        } else if (const auto code = code_point()) {
          range(*code, *code);
        } else {
          class_escape(false);
        }
      }
    }
    return std::move(out_);
  }
 private:
  [[noreturn]] void refuse(std::string_view what) const {
    PITH_FAIL("regex construct {} is not supported, in {}", what, pattern_);
  }
  char peek(size_t ahead = 0) const {
    return at_ + ahead < pattern_.size() ? pattern_[at_ + ahead] : '\0';
  }
  void take() { out_ += pattern_[at_++]; }

  // Code points that stand for themselves. A stand-in would hide one from the pattern.
  void range(char32_t first, char32_t last) {
    if (!unicode_stand_ins_respect(first, last)) {
      refuse(fmt::format("U+{:04X}-U+{:04X} (cuts code points younger than Unicode 14)",
          static_cast<uint32_t>(first), static_cast<uint32_t>(last)));
    }
    out_ += fmt::format("\\x{{{:X}}}", static_cast<uint32_t>(first));
    if (last != first) out_ += fmt::format("-\\x{{{:X}}}", static_cast<uint32_t>(last));
  }

  // The code point of a character or an escape; an escape that names a class is left unread.
  std::optional<char32_t> code_point() {
    if (peek() != '\\') return utf8_next(pattern_, at_);
    PITH_CHECK(at_ + 1 < pattern_.size(), "regex {} ends in \\", pattern_);
    const char c = peek(1);
    constexpr std::string_view kLetters = "nrtfvae", kCodes = "\n\r\t\f\v\a\x1B";
    const size_t letter = kLetters.find(c);
    if (c == 'u' || c == 'x') return hexadecimal();
    if (letter == kLetters.npos && std::isalnum(static_cast<unsigned char>(c))) return std::nullopt;
    ++at_;
    const char32_t code = utf8_next(pattern_, at_);
    return letter == kLetters.npos ? code : static_cast<char32_t>(kCodes[letter]);
  }

  char32_t hexadecimal() {  // \uHHHH, \xHH or \x{H...}
    const bool braces = peek(1) == 'x' && peek(2) == '{';
    at_ += braces ? 3 : 2;
    const size_t size = braces ? pattern_.find('}', at_) - at_ : pattern_[at_ - 1] == 'u' ? 4 : 2;
    const std::string_view digits = pattern_.substr(std::min(at_, pattern_.size()), size);
    uint32_t code = 0;
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    const bool scalar = code < 0xD800 || (code >= 0xE000 && code < 0x110000);
    PITH_CHECK(error == std::errc() && end == digits.data() + size && scalar,
        "regex {}: bad hexadecimal code point", pattern_);
    at_ += size + braces;
    return code;
  }

  void class_escape(bool in_class) {
    const char c = peek(1);
    const std::string_view open = in_class ? "" : "[", close = in_class ? "" : "]";
    at_ += 2;
    if (c == 'p' || c == 'P') {
      property(c == 'P');
    } else if (is_one_of(c, in_class ? "dDsS" : "dDsSAz")) {
      out_ += {'\\', c};
    } else if (c == 'w') {
      out_ += fmt::format("{}{}{}", open, kOnigurumaWord, close);
    } else if (c == 'h' && !rust_) {
      out_ += fmt::format("{}0-9A-Fa-f{}", open, close);
    } else if (c == 'W' && !in_class) {
      out_ += fmt::format("[^{}]", kOnigurumaWord);
    } else if (is_one_of(c, "bB") && !in_class) {
      const char after = c == 'b' ? '!' : '=', before = c == 'b' ? '=' : '!';
      out_ += fmt::format(
          "(?:(?<=[{0}])(?{1}[{0}])|(?<![{0}])(?{2}[{0}]))", kOnigurumaWord, after, before);
    } else {
      refuse(fmt::format("\\{}{}", c, in_class ? " in a class" : ""));
    }
  }

  void property(bool negated) {
    const size_t end = pattern_.find('}', at_);
    if (peek() != '{' || end == pattern_.npos) refuse("\\p without {}");
    std::string_view name = pattern_.substr(at_ + 1, end - at_ - 1);
    if (name.starts_with('^')) {
      negated = !negated;
      name.remove_prefix(1);
    }
    if (kCategories.find(fmt::format(" {} ", name)) == kCategories.npos)
      refuse(fmt::format("\\p{{{}}}", name));
    out_ += fmt::format("\\{}{{{}}}", negated ? 'P' : 'p', name);
    at_ = end + 1;
  }

  void character_class() {
    take();
    if (peek() == '^') take();
    for (bool first = true; first || peek() != ']'; first = false) {
      PITH_CHECK(at_ < pattern_.size(), "regex {}: [ without ]", pattern_);
      if (peek() == '[') refuse("[ inside a class");
      if (peek() == peek(1) && is_one_of(peek(), rust_ ? "&-~" : "&"))
        refuse("set operation in a class");
      const auto code = code_point();
      if (!code) {
        class_escape(true);
        continue;
      }
      auto last = code;
      if (peek() == '-' && peek(1) != ']' && peek(1) != '\0') {
        ++at_;
        if (peek() == '[') refuse("[ inside a class");
        last = code_point();
        PITH_CHECK(
            last && *code <= *last, "regex {}: a range in a class ends before it begins", pattern_);
      }
      range(*code, *last);
    }
    take();
  }

  void open_group() {
    take();
    if (peek() == '*') refuse("(*");
    if (peek() != '?') return;
    const std::string_view rest = pattern_.substr(at_);
    for (std::string_view known : {"?:", "?=", "?!", "?>", "?<=", "?<!", "?i:", "?i)"}) {
      // Behind the beginning, an option for the rest of a group binds otherwise in Oniguruma.
      if (!rest.starts_with(known) || (known == "?i)" && at_ > 1)) continue;
      const size_t size = known == "?i)" ? 2 : known.size();
      out_ += rest.substr(0, size);
      at_ += size;
      return;
    }
    refuse(fmt::format("({}", rest.substr(0, 3)));
  }

  // {n}, {n,}, {,n} or {n,m}; returns false for a brace that stands for itself.
  bool interval() {
    const size_t end = pattern_.find('}', at_);
    const auto body = pattern_.substr(at_ + 1, end == pattern_.npos ? 0 : end - at_ - 1);
    const size_t comma = body.find(',');
    if (body.empty() || body == "," || comma != body.rfind(',') ||
        body.find_first_not_of("0123456789,") != body.npos)
      return false;
    if (rust_ && comma == 0) refuse("{,n}");
    out_ += fmt::format("{{{}{}}}", comma == 0 ? "0" : "", body);
    at_ = end + 1;
    if (!rust_ && peek() == '?' && comma == body.npos) refuse("{n}?");
    if (!rust_ && peek() == '+') {  // not possessive in Oniguruma: the interval is repeated
      out_.insert(atom_, "(?:");
      out_ += ')';
    }
    return true;
  }

  const std::string_view pattern_;
  const bool rust_;
  std::string out_;
  size_t at_ = 0;
  size_t atom_ = 0;             // where the last repeatable construct starts in out_
  std::vector<size_t> groups_;  // where each open group starts in out_
};

std::string pcre2_message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

template <auto free_it>
struct Free {
  void operator()(auto* it) const { free_it(it); }
};
struct Scratch {  // what a thread needs to match
  std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>> data{
      pcre2_match_data_create(1, nullptr)};
  std::unique_ptr<pcre2_match_context, Free<pcre2_match_context_free>> context{
      pcre2_match_context_create(nullptr)};
  std::unique_ptr<pcre2_jit_stack, Free<pcre2_jit_stack_free>> stack{
      pcre2_jit_stack_create(64 << 10, 64 << 20, nullptr)};
  Scratch() {
    PITH_CHECK(data && context && stack, "out of memory for regular expressions");
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }
};

}  // namespace

Regex::Regex(std::string_view pattern, Dialect dialect) : stand_ins_(dialect != Dialect::kPcre2) {
  const bool rust = dialect == Dialect::kRust;
  const std::string translated =
      stand_ins_ ? Translator(pattern, rust).run() : std::string(pattern);
  int error = 0;
  size_t place = 0;
  const std::shared_ptr<pcre2_compile_context> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  // ^ and $ match at every line in Oniguruma; in Rust $ matches at the end and nowhere else.
  const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C |
                           (rust ? PCRE2_DOLLAR_ENDONLY : PCRE2_MULTILINE);
  code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                  options, &error, &place, context.get()),
      pcre2_code_free);
  PITH_CHECK(code_, "regex {}: {} at byte {} of its translation {}", pattern, pcre2_message(error),
      place, translated);
  jit_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

Regex Regex::literal(std::string text) {
  Regex regex;
  regex.literal_ = std::move(text);
  return regex;
}

bool Regex::find(std::string_view text, size_t from, size_t& begin, size_t& end) const {
  if (!code_) {
    begin = text.find(literal_, from);
    end = begin + literal_.size();
    return begin != text.npos;
  }
  thread_local const Scratch scratch;
  const int found = (jit_ ? pcre2_jit_match : pcre2_match)(code_.get(),
      reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from, jit_ ? 0 : PCRE2_NO_UTF_CHECK,
      scratch.data.get(), scratch.context.get());
  if (found == PCRE2_ERROR_NOMATCH) return false;
  PITH_CHECK(found >= 0, "regular expression failed on a text of {} bytes: {}", text.size(),
      pcre2_message(found));
  begin = pcre2_get_ovector_pointer(scratch.data.get())[0];
  end = pcre2_get_ovector_pointer(scratch.data.get())[1];
  return true;
}

}  // namespace pith
