// The components of a tokenizer.json as plain structs: what happens to text before the model, and
// to tokens when they are decoded. tokenizer_load.cpp makes them, tokenizer.cpp runs them.
#pragma once
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "text/tokenizer_regex.h"
#include "text/tokenizer_text.h"
#include "text/unicode.h"
#include "text/unicode_normalize.h"

namespace pith {

struct Replace {
  Regex pattern;
  std::string content;
};

// Normalizers
struct Lowercase {};
struct Prepend {
  std::string content;
};
using Normalizer = std::variant<NormalForm, Lowercase, Replace, Prepend>;

// Pre-tokenizers. What becomes of the matches that a text is split at:
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct SplitRegex {
  Regex pattern;
  SplitBehavior behavior;
  bool invert;
};
struct SplitByteLevel {  // always the last one: the model reads bytes from here on
  bool add_prefix_space;
  std::optional<Regex> pattern;
};
struct SplitDigits {
  bool individual;
};
struct SplitPunctuation {
  SplitBehavior behavior;
};
struct SplitMetaspace {
  enum class Prepend { kFirst, kNever, kAlways };
  std::string replacement;
  Prepend prepend;
  bool split;
};
using PreTokenizer =
    std::variant<SplitRegex, SplitByteLevel, SplitDigits, SplitPunctuation, SplitMetaspace>;

// Decoders
struct DecodeByteLevel {};
struct DecodeByteFallback {};
struct DecodeFuse {};
struct DecodeStrip {
  std::string content;  // one character
  size_t start, stop;
};
struct DecodeMetaspace {
  std::string replacement;
  bool drops_first;  // the space that encoding put before the text
};
using Decoder = std::variant<DecodeByteLevel, DecodeByteFallback, DecodeFuse, DecodeStrip, Replace,
    DecodeMetaspace>;

// A text as new characters at the place of the one before them.
std::vector<Change> inserted(std::string_view text);
// Applies one normalizer to `text`, writing to `out` what changes.
void apply(const Normalizer& normalizer, const Text& text, RegexScratch& scratch, Rewriter& out);
// Applies one decoder to the spelled tokens of a text.
void apply(const Decoder& decoder, std::vector<std::string>& tokens, RegexScratch& scratch);

// A fragment of a split text: a match of the pattern or what lies between matches.
// Joins and drops fragments after `behavior` and hands pieces [begin, end) to `sink`.
template <class Sink>
class Splitter {
 public:
  Splitter(SplitBehavior behavior, bool invert, Sink sink)
      : behavior_(behavior), invert_(invert), sink_(sink) {}

  void match(size_t begin, size_t end) {
    if (begin > done_) fragment(done_, begin, invert_);
    fragment(begin, end, !invert_);
    done_ = end;
  }
  void finish(size_t size) {
    if (size > done_) fragment(done_, size, invert_);
    flush();
  }

 private:
  void fragment(size_t begin, size_t end, bool is_match) {
    switch (behavior_) {
      case SplitBehavior::kIsolated:
        sink_(begin, end);
        return;
      case SplitBehavior::kRemoved:
        if (!is_match) sink_(begin, end);
        return;
      case SplitBehavior::kContiguous:
        if (is_match != last_is_match_) flush();
        break;
      case SplitBehavior::kMergedWithPrevious:
        if (!is_match || last_is_match_) flush();
        break;
      case SplitBehavior::kMergedWithNext:
        if (is_match || !last_is_match_) flush();
        break;
    }
    if (!pending_) begin_ = begin;
    pending_ = true;
    end_ = end;
    last_is_match_ = is_match;
  }
  void flush() {
    if (pending_) sink_(begin_, end_);
    pending_ = false;
  }

  const SplitBehavior behavior_;
  const bool invert_;
  Sink sink_;
  size_t done_ = 0, begin_ = 0, end_ = 0;
  bool pending_ = false, last_is_match_ = false;
};

// Calls match(begin, end) for every match of `pattern` in `subject`.
template <class Match>
void for_each_match(
    const Regex& pattern, std::string_view subject, RegexScratch& scratch, Match match) {
  size_t from = 0, begin = 0, end = 0, last = SIZE_MAX;
  while (from <= subject.size() && pattern.find(subject, from, scratch, begin, end)) {
    const bool empty = begin == end;
    if (!(empty && begin == last)) match(begin, end);  // an empty match never follows a match
    last = from = end;
    if (!empty) continue;
    do ++from;
    while (from < subject.size() && utf8_continues(subject[from]));
  }
}

// The same in a text that may need stand-ins.
template <class Match>
void for_each_match_in(
    std::string_view text, const Regex& pattern, RegexScratch& scratch, Match match) {
  std::string subject;
  const bool differs = unicode_substitute(text, subject);
  for_each_match(pattern, differs ? subject : text, scratch, match);
}

}  // namespace pith
