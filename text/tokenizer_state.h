// What a loaded tokenizer consists of; private to text/. tokenizer_load.cpp makes a State of files,
// tokenizer.cpp runs it, tokenizer_stages.cpp and tokenizer_regex.cpp hold its steps.
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include "text/bpe.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace pith {
// A regular expression of a tokenizer file, run by PCRE2's JIT.
class Regex {
 public:
  // tokenizer.json is written for Oniguruma: what PCRE2 would read otherwise is translated or
  // refused by name, and text is seen with stand-ins. kPcre2 is for this program's own.
  enum class Syntax { kOniguruma, kPcre2 };
  explicit Regex(string_view pattern, Syntax syntax = Syntax::kOniguruma);
  static Regex literal(string text); // matches this text, which is not empty, alone

  // Calls match(begin, end) for every match in well-formed UTF-8, from left to right.
  template <class Match> void for_each_match(string_view text, Match match) const {
    string substitute;
    if (stand_ins_ && unicode_substitute(text, substitute)) text = substitute;
    size_t from = 0, begin = 0, end = 0, last = SIZE_MAX;
    while (from <= text.size() && find(text, from, begin, end)) {
      const bool empty = begin == end;
      if (!(empty && begin == last)) match(begin, end); // an empty match never follows a match
      last = from = end;
      if (!empty) continue;
      do ++from;
      while (from < text.size() && utf8_continues(text[from]));
    }
  }
  // The first match from a place on; `text` is seen as it is.
  bool find(string_view text, size_t from, size_t& begin, size_t& end) const;
 private:
  Regex() = default;
  string literal_; // instead of code_
  shared_ptr<pcre2_code> code_;
  bool jit_ = false, stand_ins_ = false;
};

// Well-formed UTF-8 on its way to the model.
struct Text {
  string_view text;
  const TokenSpan* origin = nullptr; // input bytes behind each byte; null: those from `base` on
  uint32_t base = 0; // where in the input it begins

  Text slice(size_t begin, size_t end) const {
    const string_view part = text.substr(begin, end - begin);
    if (origin) return {part, origin + begin, origin[begin].begin};
    return {part, nullptr, base + uint32_t(begin)};
  }
  // Input bytes of text[begin, end), grown to whole characters.
  TokenSpan origin_of(size_t begin, size_t end) const;
};

struct Change { // a character of changed text
  char32_t code;
  int moved; // 1: new, where the old one before it was; 0: for an old one; -n: and n after it
};

// Builds a changed copy of a Text from left to right. Places are kept where `track` is set.
class Rewriter {
 public:
  Rewriter(const Text& from, bool track) : from_(from), track_(track) {}
  // Replaces bytes [begin, end), behind all replaced before; the first `skipped` are dropped before
  // the first change.
  void replace(size_t begin, size_t end, span<const Change> changes, size_t skipped = 0);
  Text finish(); // copies the rest, if anything changed; the result views this object
 private:
  void copy(size_t end);
  const Text from_;
  const bool track_;
  bool changed_ = false;
  size_t copied_ = 0;
  string text_;
  vector<TokenSpan> origin_;
};

// Stages: normalizers and pre-tokenizers. Only the latter split.
struct NormalForm {
  bool composes, compatible; // NFC and NFKC; NFKC and NFKD
};
struct Lowercase {};
struct Replace {
  Regex pattern;
  string content;
};
struct Prepend {
  string content;
  bool unless_there = false; // only to text that does not begin with it
  bool only_at_start = false; // only where the input begins
};
// What becomes of the matches that a text is split at:
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };
struct Split {
  Regex pattern;
  SplitBehavior behavior;
  bool invert = false; // matches are what lies between
};
using Stage = std::variant<NormalForm, Lowercase, Replace, Prepend, Split>;

// The text after a stage that is not Split; it may view `out`.
Text apply(const Stage& stage, const Text& text, Rewriter& out);

// Calls sink(begin, end) for the pieces of `text`.
template <class Sink> void split_text(const Split& split, string_view text, Sink sink) {
  size_t begin = 0, done = 0; // text[begin, done) waits for what may join it
  bool is_match = false; // and is, or ends in, a match
  auto cut = [&] {
    if (begin < done && !(is_match && split.behavior == SplitBehavior::kRemoved)) sink(begin, done);
    begin = done;
  };
  auto add = [&](size_t end, bool match) {
    using enum SplitBehavior;
    const bool joins = (split.behavior == kContiguous && match == is_match) ||
      (split.behavior == kMergedWithPrevious && match && !is_match) ||
      (split.behavior == kMergedWithNext && !match && is_match);
    if (!joins) cut();
    done = end;
    is_match = match;
  };
  split.pattern.for_each_match(text, [&](size_t match_begin, size_t match_end) {
    if (match_begin > done) add(match_begin, split.invert);
    add(match_end, !split.invert);
  });
  if (text.size() > done) add(text.size(), split.invert);
  cut();
}

// Decoders
struct DecodeByteLevel {};
struct DecodeByteFallback {};
struct DecodeFuse {};
struct DecodeReplace : Replace {
  bool drops_first = false; // in the first token it drops: the space that encoding put there
};
using Decoder = std::variant<DecodeByteLevel, DecodeByteFallback, DecodeFuse, DecodeReplace>;

// Applies one decoder to the spelled tokens of a text.
void apply(const Decoder& decoder, vector<string>& tokens);
int fallback_byte(const string& token); // of "<0x41>"; -1: it is none

struct AddedToken {
  string content;
  int32_t id = -1;
  bool special = false, normalized = false, lstrip = false, rstrip = false, single_word = false;
};

// Finds the leftmost, then longest, of a set of strings.
class AddedTokenMatcher {
 public:
  void add(string_view text, const AddedToken* token) {
    if (text.empty()) return;
    tokens_.try_emplace(string(text), token);
    starts_.set(uint8_t(text[0]));
  }
  // The first match at or behind `from`; nullptr when there is none.
  const AddedToken* find(string_view text, size_t from, size_t& begin, size_t& end) const;
 private:
  map<string, const AddedToken*, std::less<>> tokens_;
  std::bitset<256> starts_;
};

struct Tokenizer::State {
  string json, config, chat_template_file; // as they were read: save() writes them back
  vector<string> tokens; // by id, added tokens included
  unordered_map<string, int32_t> ids;
  map<int32_t, AddedToken> added;
  AddedTokenMatcher raw_added, normalized_added;

  vector<Stage> normalizers, pre_tokenizers;
  vector<Decoder> decoders;
  bool no_decoder = false; // tokens are joined with spaces then
  bool byte_level = false; // the model reads bytes
  Bpe bpe;
  vector<int32_t> prefix, suffix; // ids that the post-processor puts around a text
  bool trim_offsets = false, trim_keeps_prefix_space = false;
  bool needs_places = false; // even when the caller asks for no offsets

  optional<int32_t> bos, eos, pad;
  string chat_template;
  uint64_t hash = 0;

  const string& spelling(int32_t id) const; // fails outside the vocabulary
  optional<int32_t> find(string_view token) const {
    const auto found = ids.find(string(token));
    return found == ids.end() ? nullopt : optional(found->second);
  }

  // Scratch is lent to one encode at a time, so that caches stay warm between calls.
  mutable std::mutex mutex;
  mutable vector<unique_ptr<Bpe::Scratch>> idle;

  // Text after all normalizers. `storage` keeps what they wrote.
  Text normalize(Text text, bool track, std::list<Rewriter>& storage) const {
    for (const Stage& stage: normalizers)
      text = apply(stage, text, storage.emplace_back(text, track));
    return text;
  }
};

// A tokenizer.json of a byte-level BPE. Tokens by id, as spell_bytes spells them.
string byte_level_json(const vector<string>& vocabulary,
  const vector<pair<int32_t, int32_t>>& merges, string_view pattern,
  const vector<pair<string, int32_t>>& special);
string tokenizer_config_json(string_view end_of_text);

// Calls work(thread, i) for every i below `count`, on several threads, the caller's among them.
template <class Work> void on_threads(int threads, size_t count, Work work) {
  std::atomic<size_t> next = 0;
  const auto run = [&](int thread) {
    for (size_t i; (i = next++) < count;) work(thread, i);
  };
  vector<std::future<void>> helpers;
  for (int i = 1; i < threads; ++i) helpers.push_back(std::async(std::launch::async, run, i));
  run(0);
  for (std::future<void>& helper: helpers) helper.get();
}
}
