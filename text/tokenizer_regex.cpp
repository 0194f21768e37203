#include "text/tokenizer_regex.h"

#include <charconv>
#include <vector>

#include "core/error.h"
#include "text/unicode.h"

namespace pith {
namespace {

// What \w holds in Oniguruma, as class members.
constexpr std::string_view kWordMembers =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}\\x{24B6}-\\x{24E9}"
    "\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}";

constexpr std::string_view kCategories =
    " L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp Cc Cf"
    " Co ";

// Rewrites a pattern into PCRE2's syntax, one construct at a time, or refuses it.
class Translator {
 public:
  Translator(std::string_view pattern, Regex::Dialect dialect)
      : pattern_(pattern), rust_(dialect == Regex::Dialect::kRust) {}

  std::string run() {
    PITH_CHECK(utf8_valid_prefix(pattern_) == pattern_.size(), "regex is not UTF-8");
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      if (c == '\\') {
        atom_ = out_.size();
        ++at_;
        escape(false);
      } else if (c == '[') {
        atom_ = out_.size();
        character_class();
      } else if (c == '(') {
        open_group();
      } else if (c == ')') {
        PITH_CHECK(!groups_.empty(), "regex {}: ) without (", pattern_);
        atom_ = groups_.back();
        groups_.pop_back();
        take();
      } else if (c == '{') {
        interval();
      } else if ((c == '^' || c == '$') && !rust_) {  // always at lines in Oniguruma
        atom_ = out_.size();
        out_ += c == '^' ? "(?m:^)" : "(?m:$)";
        ++at_;
      } else if (c == '$') {  // in Rust the end and nothing else
        out_ += "\\z";
        ++at_;
      } else if (std::string_view("*+?|.^").find(c) != std::string_view::npos) {
        if (c == '.' || c == '|') atom_ = out_.size();
        take();
      } else {
        atom_ = out_.size();
        literal(utf8_next(pattern_, at_));
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

  // A code point that stands for itself. A stand-in would hide it from the pattern.
  void literal(char32_t code) { range(code, code); }
  void range(char32_t first, char32_t last) {
    if (!unicode_stand_ins_respect(first, last)) {
      refuse(fmt::format("U+{:04X}-U+{:04X} (cuts code points younger than Unicode 14)",
          static_cast<uint32_t>(first), static_cast<uint32_t>(last)));
    }
    spell(first);
    if (last == first) return;
    out_ += '-';
    spell(last);
  }
  void spell(char32_t code) {
    const bool plain = code == ' ' || (code < 0x80 && std::isalnum(static_cast<int>(code)));
    out_ += plain ? std::string(1, static_cast<char>(code))
                  : fmt::format("\\x{{{:X}}}", static_cast<uint32_t>(code));
  }

  char32_t hex(size_t digits) {
    const std::string_view text = pattern_.substr(at_, digits);
    uint32_t value = 0;
    const auto end = std::from_chars(text.data(), text.data() + text.size(), value, 16).ptr;
    const bool scalar = value < 0xD800 || (value >= 0xE000 && value < 0x110000);
    PITH_CHECK(end == text.data() + digits && digits > 0 && scalar,
        "regex {}: bad hexadecimal code point", pattern_);
    at_ += digits;
    return value;
  }

  // at_ stands behind \ . Returns the code point when the escape spells one, else writes a class.
  bool escaped_code(char32_t& code) {
    const char c = peek();
    const std::string_view letters = "nrtfvae", codes = "\n\r\t\f\v\a\x1B";
    if (const size_t i = letters.find(c); c && i != std::string_view::npos) {
      code = static_cast<char32_t>(codes[i]);
      ++at_;
    } else if (c == 'u') {
      ++at_;
      code = hex(4);
    } else if (c == 'x' && peek(1) == '{') {
      at_ += 2;
      const size_t end = pattern_.find('}', at_);
      PITH_CHECK(end != std::string_view::npos && end - at_ <= 8, "regex {}: bad \\x{{", pattern_);
      code = hex(end - at_);
      ++at_;
    } else if (c == 'x') {
      ++at_;
      code = hex(2);
    } else if (c && !std::isalnum(static_cast<unsigned char>(c))) {
      code = utf8_next(pattern_, at_);
    } else {
      return false;
    }
    return true;
  }

  void escape(bool in_class) {
    PITH_CHECK(at_ < pattern_.size(), "regex {} ends in \\", pattern_);
    char32_t code;
    if (escaped_code(code)) return literal(code);
    const char c = pattern_[at_++];
    if (c == 'p' || c == 'P') return property(c == 'P');
    if (std::string_view(in_class ? "dDsS" : "dDsSAz").find(c) != std::string_view::npos) {
      out_ += {'\\', c};
    } else if (c == 'w') {
      out_ += in_class ? std::string(kWordMembers) : fmt::format("[{}]", kWordMembers);
    } else if (c == 'W' && !in_class) {
      out_ += fmt::format("[^{}]", kWordMembers);
    } else if (c == 'h' && !rust_) {
      out_ += in_class ? "0-9A-Fa-f" : "[0-9A-Fa-f]";
    } else if ((c == 'b' || c == 'B') && !in_class) {
      const std::string_view after = c == 'b' ? "!" : "=", before = c == 'b' ? "=" : "!";
      out_ += fmt::format(
          "(?:(?<=[{0}])(?{1}[{0}])|(?<![{0}])(?{2}[{0}]))", kWordMembers, after, before);
    } else {
      refuse(fmt::format("\\{}{}", c, in_class ? " in a class" : ""));
    }
  }

  void property(bool negated) {
    const size_t end = pattern_.find('}', at_);
    if (peek() != '{' || end == std::string_view::npos) refuse("\\p without {}");
    std::string_view name = pattern_.substr(at_ + 1, end - at_ - 1);
    if (name.starts_with('^')) {
      negated = !negated;
      name.remove_prefix(1);
    }
    if (kCategories.find(fmt::format(" {} ", name)) == std::string_view::npos)
      refuse(fmt::format("\\p{{{}}}", name));
    out_ += fmt::format("\\{}{{{}}}", negated ? 'P' : 'p', name);
    at_ = end + 1;
  }

  void character_class() {
    take();
    if (peek() == '^') take();
    bool first = true;
    while (true) {
      PITH_CHECK(at_ < pattern_.size(), "regex {}: [ without ]", pattern_);
      const char c = pattern_[at_];
      if (c == ']' && !first) break;
      if (c == '[') refuse(peek(1) == ':' ? "[[:class:]]" : "[ inside a class");
      if (c == '&' && peek(1) == '&') refuse("&& in a class");
      if (rust_ && (c == '-' || c == '~') && peek(1) == c) refuse("set operation in a class");
      first = false;
      char32_t code;
      if (c == '\\') {
        ++at_;
        if (!escaped_code(code)) {
          escape(true);
          continue;
        }
      } else {
        code = utf8_next(pattern_, at_);
      }
      char32_t last = code;
      if (peek() == '-' && peek(1) != ']' && peek(1) != '\0') {
        ++at_;
        if (peek() == '[') refuse("[ inside a class");
        if (peek() != '\\') {
          last = utf8_next(pattern_, at_);
        } else {
          ++at_;
          PITH_CHECK(escaped_code(last), "regex {}: a class ends a range", pattern_);
        }
        PITH_CHECK(code <= last, "regex {}: empty range in a class", pattern_);
      }
      range(code, last);
    }
    take();
  }

  void open_group() {
    groups_.push_back(out_.size());
    take();
    if (peek() == '*') refuse("(*");
    if (peek() != '?') return;
    const std::string_view rest = pattern_.substr(at_);
    for (std::string_view known : {"?:", "?=", "?!", "?>", "?<=", "?<!", "?i:"}) {
      if (!rest.starts_with(known)) continue;
      out_ += known;
      at_ += known.size();
      return;
    }
    // Elsewhere an option for the rest of a group binds otherwise in Oniguruma.
    if (rest.starts_with("?i)") && at_ == 1) {
      out_ += "?i";
      at_ += 2;
      return;
    }
    refuse(fmt::format("({}", rest.substr(0, 3)));
  }

  void interval() {
    const size_t end = pattern_.find('}', at_);
    const std::string body(pattern_.substr(at_ + 1, end == pattern_.npos ? 0 : end - at_ - 1));
    const size_t comma = body.find(',');
    if (body.empty() || body == "," || comma != body.rfind(',') ||
        body.find_first_not_of("0123456789,") != body.npos) {
      atom_ = out_.size();
      return literal(utf8_next(pattern_, at_));
    }
    if (rust_ && comma == 0) refuse("{,n}");
    out_ += '{' + (comma == 0 ? "0" : std::string()) + body + '}';
    at_ = end + 1;
    if (rust_) return;
    if (peek() == '?' && comma == std::string::npos) refuse("{n}?");
    if (peek() == '+') {  // not possessive in Oniguruma: the interval is repeated
      out_.insert(atom_, "(?:");
      out_ += ')';
    }
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

}  // namespace

RegexScratch::RegexScratch()
    : data_(pcre2_match_data_create(1, nullptr), pcre2_match_data_free),
      context_(pcre2_match_context_create(nullptr), pcre2_match_context_free),
      stack_(pcre2_jit_stack_create(64 << 10, 64 << 20, nullptr), pcre2_jit_stack_free) {
  PITH_CHECK(data_ && context_ && stack_, "out of memory for regular expressions");
  pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
}

std::string Regex::translate(std::string_view pattern, Dialect dialect) {
  return Translator(pattern, dialect).run();
}

Regex Regex::literal(std::string_view text) {
  std::string pattern;
  for (size_t at = 0; at < text.size();)
    pattern += fmt::format("\\x{{{:X}}}", static_cast<uint32_t>(utf8_next(text, at)));
  return Regex(pattern);
}

Regex::Regex(std::string_view pattern, Dialect dialect) {
  const std::string translated = translate(pattern, dialect);
  int error = 0;
  size_t place = 0;
  const std::shared_ptr<pcre2_compile_context> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                  PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &place, context.get()),
      pcre2_code_free);
  PITH_CHECK(code_, "regex {}: {} at byte {} of its translation {}", pattern, pcre2_message(error),
      place, translated);
  jit_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

bool Regex::find(std::string_view subject, size_t from, RegexScratch& scratch, size_t& begin,
    size_t& end) const {
  const auto* text = reinterpret_cast<PCRE2_SPTR>(subject.data());
  auto* data = scratch.data_.get();
  const int found = jit_ ? pcre2_jit_match(code_.get(), text, subject.size(), from, 0, data,
                               scratch.context_.get())
                         : pcre2_match(code_.get(), text, subject.size(), from, PCRE2_NO_UTF_CHECK,
                               data, scratch.context_.get());
  if (found == PCRE2_ERROR_NOMATCH) return false;
  PITH_CHECK(found >= 0, "regular expression failed on a text of {} bytes: {}", subject.size(),
      pcre2_message(found));
  begin = pcre2_get_ovector_pointer(data)[0];
  end = pcre2_get_ovector_pointer(data)[1];
  return true;
}

}  // namespace pith
