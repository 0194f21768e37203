#include "text/tokenizer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <future>

#include "core/error.h"
#include "text/tokenizer_state.h"
#include "text/unicode.h"

namespace pith {

AddedTokenMatcher::AddedTokenMatcher(
    std::vector<std::pair<std::string, const AddedToken*>> tokens) {
  std::stable_sort(
      tokens.begin(), tokens.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [text, token] : tokens) {
    int prefix = static_cast<int>(patterns_.size()) - 1;
    while (prefix >= 0 && !text.starts_with(at(prefix).text)) prefix = at(prefix).prefix;
    if (text.empty() || (prefix >= 0 && at(prefix).text == text)) continue;
    patterns_.push_back({text, token, prefix});
    starts_[static_cast<uint8_t>(text[0])] = true;
  }
}

const AddedToken* AddedTokenMatcher::find(
    std::string_view text, size_t from, size_t& begin, size_t& end) const {
  for (begin = from; begin < text.size(); ++begin) {
    if (!starts_[static_cast<uint8_t>(text[begin])]) continue;
    // Every pattern that begins `rest` is the last one that sorts before it, or a prefix of that.
    const std::string_view rest = text.substr(begin);
    const auto after = std::upper_bound(patterns_.begin(), patterns_.end(), rest,
        [](std::string_view s, const Pattern& p) { return s < p.text; });
    for (int i = static_cast<int>(after - patterns_.begin()) - 1; i >= 0; i = at(i).prefix) {
      if (!rest.starts_with(at(i).text)) continue;
      end = begin + at(i).text.size();
      return at(i).token;
    }
  }
  return nullptr;
}

std::unique_ptr<TokenizerScratch> Tokenizer::State::borrow() const {
  const std::lock_guard lock(mutex);
  if (idle.empty()) return std::make_unique<TokenizerScratch>();
  auto scratch = std::move(idle.back());
  idle.pop_back();
  return scratch;
}

void Tokenizer::State::give_back(std::unique_ptr<TokenizerScratch> scratch) const {
  const std::lock_guard lock(mutex);
  idle.push_back(std::move(scratch));
}

bool Tokenizer::State::decodes_bytes() const {
  return decoders.size() == 1 && std::holds_alternative<DecodeByteLevel>(decoders[0]);
}

Text Tokenizer::State::normalize(Text text, bool track, RegexScratch& scratch,
    std::vector<std::unique_ptr<Rewriter>>& storage) const {
  for (const Normalizer& normalizer : normalizers) {
    auto out = std::make_unique<Rewriter>(text, track);
    apply(normalizer, text, scratch, *out);
    if (!out->changed()) continue;
    text = out->finish();
    storage.push_back(std::move(out));
  }
  return text;
}

namespace {

// One text on its way through the stages. Pieces go depth first, so nothing but ids grows.
class Encoder {
 public:
  Encoder(const Tokenizer::State& state, const EncodeOptions& options, TokenizerScratch& scratch,
      Encoding& out)
      : state_(state), options_(options), scratch_(scratch), out_(out) {}

  void run(std::string_view input) {
    PITH_CHECK(input.size() < UINT32_MAX, "a text of {} bytes is too long", input.size());
    input_ = input;
    Text text{input, input};
    text.at_start = true;
    split_at_added(state_.raw_added, text, [&](const Text& part) { normalize(part); });
  }

 private:
  bool track() const { return options_.offsets || state_.needs_places; }

  // Emits the added tokens in `text` and gives what lies between them to `rest`.
  template <class Rest>
  void split_at_added(const AddedTokenMatcher& matcher, const Text& text, Rest rest) {
    size_t done = 0, from = 0, begin = 0, end = 0;
    const std::string_view s = text.text;
    while (!matcher.empty()) {
      const AddedToken* token = matcher.find(s, from, begin, end);
      if (!token) break;
      from = end;
      if (token->special && !options_.parse_special) continue;
      if (token->single_word && (word_ends_at(s, begin) || word_starts_at(s, end))) continue;
      if (token->lstrip) begin = std::max(done, space_before(s, begin));
      if (token->rstrip) end = space_behind(s, end);
      if (done < begin) rest(text.slice(done, begin));
      out_.ids.push_back(token->id);
      if (options_.offsets) place(text, begin, end, false);
      done = end;
      from = std::max(from, end);
    }
    if (done < s.size()) rest(text.slice(done, s.size()));
  }

  static size_t previous(std::string_view s, size_t at) {
    do --at;
    while (at > 0 && utf8_continues(s[at]));
    return at;
  }
  static char32_t code_at(std::string_view s, size_t at) { return utf8_next(s, at); }
  static char32_t code_before(std::string_view s, size_t at) { return code_at(s, previous(s, at)); }
  static bool word_ends_at(std::string_view s, size_t at) {
    return at > 0 && is_word(code_before(s, at));
  }
  static bool word_starts_at(std::string_view s, size_t at) {
    return at < s.size() && is_word(code_at(s, at));
  }
  static size_t space_before(std::string_view s, size_t at) {
    while (at > 0 && is_white_space(code_before(s, at))) at = previous(s, at);
    return at;
  }
  static size_t space_behind(std::string_view s, size_t at) {
    for (size_t next = at; next < s.size() && is_white_space(utf8_next(s, next));) at = next;
    return at;
  }

  void normalize(const Text& part) {
    std::vector<std::unique_ptr<Rewriter>> storage;
    const Text text = state_.normalize(part, track(), scratch_.regex, storage);
    split_at_added(state_.normalized_added, text, [&](const Text& rest) {
      with_subject(rest, [&](const Text& whole) { pre_tokenize(0, whole); });
    });
  }

  template <class Next>
  void with_subject(Text text, Next next) const {
    std::string subject;
    text.subject = text.text;
    if (state_.uses_subject && unicode_substitute(text.text, subject)) text.subject = subject;
    next(text);
  }

  void pre_tokenize(size_t stage, const Text& text) {
    if (text.text.empty()) return;
    if (stage == state_.pre_tokenizers.size()) return model(text);
    std::visit(
        [&](const auto& splitter) { split(splitter, stage, text); }, state_.pre_tokenizers[stage]);
  }

  auto pieces_to(size_t stage, const Text& text) {
    return [this, stage, &text](size_t begin, size_t end) {
      if (begin < end) pre_tokenize(stage, text.slice(begin, end));
    };
  }

  void split_matches(
      const Regex& pattern, SplitBehavior behavior, bool invert, size_t stage, const Text& text) {
    Splitter splitter(behavior, invert, pieces_to(stage + 1, text));
    for_each_match(pattern, text.subject, scratch_.regex,
        [&](size_t begin, size_t end) { splitter.match(begin, end); });
    splitter.finish(text.text.size());
  }

  template <class Predicate>
  void split_characters(
      Predicate is_match, SplitBehavior behavior, size_t stage, const Text& text) {
    Splitter splitter(behavior, false, pieces_to(stage + 1, text));
    for (size_t at = 0; at < text.text.size();) {
      const size_t begin = at;
      if (is_match(utf8_next(text.text, at))) splitter.match(begin, at);
    }
    splitter.finish(text.text.size());
  }

  void split(const SplitRegex& s, size_t stage, const Text& text) {
    split_matches(s.pattern, s.behavior, s.invert, stage, text);
  }

  void split(const SplitByteLevel& s, size_t stage, const Text& text) {
    if (!s.add_prefix_space || text.text.starts_with(' ')) return split_bytes(s, stage, text);
    Rewriter spaced(text, track());
    spaced.prepend(" ");
    with_subject(spaced.finish(), [&](const Text& changed) { split_bytes(s, stage, changed); });
  }
  void split_bytes(const SplitByteLevel& s, size_t stage, const Text& text) {
    if (!s.pattern) return pre_tokenize(stage + 1, text);
    split_matches(*s.pattern, SplitBehavior::kIsolated, false, stage, text);
  }

  void split(const SplitDigits& s, size_t stage, const Text& text) {
    split_characters(is_numeric,
        s.individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous, stage, text);
  }
  void split(const SplitPunctuation& s, size_t stage, const Text& text) {
    split_characters(is_punctuation, s.behavior, stage, text);
  }

  void split(const SplitMetaspace& s, size_t stage, const Text& text) {
    Rewriter spaced(text, track());
    const bool starts = text.text.starts_with(' ') || text.text.starts_with(s.replacement);
    const bool wanted = s.prepend == SplitMetaspace::Prepend::kAlways ||
                        (s.prepend == SplitMetaspace::Prepend::kFirst && text.at_start);
    if (wanted && !starts) spaced.prepend(s.replacement);
    const std::vector<Change> changes = inserted(s.replacement);
    for (size_t at = 0; (at = text.text.find(' ', at)) != std::string_view::npos; ++at)
      spaced.replace(at, at + 1, changes, 1);
    with_subject(spaced.finish(), [&](const Text& changed) {
      if (!s.split) return pre_tokenize(stage + 1, changed);
      const size_t size = s.replacement.size();
      Splitter splitter(SplitBehavior::kMergedWithNext, false, pieces_to(stage + 1, changed));
      for (size_t at = 0; (at = changed.text.find(s.replacement, at)) != std::string_view::npos;
          at += size)
        splitter.match(at, at + size);
      splitter.finish(changed.text.size());
    });
  }

  void model(const Text& text) {
    if (!options_.offsets) return state_.bpe.encode(text.text, scratch_.bpe, out_.ids, nullptr);
    scratch_.lengths.clear();
    state_.bpe.encode(text.text, scratch_.bpe, out_.ids, &scratch_.lengths);
    size_t begin = 0;
    for (const uint32_t length : scratch_.lengths) {
      place(text, begin, begin + length, state_.bpe.byte_level());
      begin += length;
    }
  }

  void place(const Text& text, size_t begin, size_t end, bool bytes) {
    TokenSpan span = text.origin_of(begin, end);
    if (state_.trim_offsets) trim(span, text.text.substr(begin, end - begin), bytes);
    out_.offsets.push_back(span);
  }

  // Takes the spaces at both ends of a token out of its span. A lone space before the first word
  // may be one that encoding added, which is not in the text.
  void trim(TokenSpan& span, std::string_view token, bool bytes) const {
    const bool first = out_.offsets.empty() || span.begin == 0;
    size_t leading = 0, trailing = 0;
    if (bytes) {
      leading = std::min(token.find_first_not_of(' '), token.size());
      trailing = token.size() - (token.find_last_not_of(' ') + 1);
    } else {
      auto is_space = [](char32_t code) { return is_white_space(code) || code == 0x120; };
      for (size_t at = 0; at < token.size() && is_space(utf8_next(token, at));) ++leading;
      for (size_t at = token.size(); at > 0 && is_space(code_before(token, at)); ++trailing)
        at = previous(token, at);
    }
    if (first && state_.trim_keeps_prefix_space && leading == 1) leading = 0;
    for (; leading > 0 && span.begin < span.end; --leading) {
      size_t at = span.begin;
      utf8_next(input_, at);
      span.begin = static_cast<uint32_t>(at);
    }
    for (; trailing > 0 && span.end > span.begin; --trailing)
      span.end = static_cast<uint32_t>(previous(input_, span.end));
  }

  const Tokenizer::State& state_;
  const EncodeOptions& options_;
  TokenizerScratch& scratch_;
  Encoding& out_;
  std::string_view input_;
};

}  // namespace

Encoding Tokenizer::encode(std::string_view input, const EncodeOptions& options) const {
  Encoding encoding;
  std::string repaired;
  if (const size_t good = utf8_valid_prefix(input); good < input.size()) {
    PITH_CHECK(!options.strict, "text is not UTF-8: byte {} is 0x{:02X}", good,
        static_cast<uint8_t>(input[good]));
    encoding.replaced_sequences = utf8_replace_invalid(input, repaired);
    input = repaired;
  }
  auto scratch = state_->borrow();
  scratch->bpe.dropped = 0;
  Encoder(*state_, options, *scratch, encoding).run(input);
  encoding.dropped_characters = scratch->bpe.dropped;
  PITH_CHECK(!options.strict || encoding.dropped_characters == 0,
      "{} characters of the text have no token", encoding.dropped_characters);
  state_->give_back(std::move(scratch));
  if (options.add_special_tokens) {
    auto& ids = encoding.ids;
    ids.insert(ids.begin(), state_->prefix.begin(), state_->prefix.end());
    ids.insert(ids.end(), state_->suffix.begin(), state_->suffix.end());
    if (options.offsets) {
      encoding.offsets.insert(encoding.offsets.begin(), state_->prefix.size(), TokenSpan{});
      encoding.offsets.resize(ids.size());
    }
  }
  return encoding;
}

std::vector<Encoding> Tokenizer::encode_batch(
    std::span<const std::string> texts, int threads, const EncodeOptions& options) const {
  std::vector<Encoding> encodings(texts.size());
  std::atomic<size_t> next = 0;
  auto work = [&] {
    for (size_t i; (i = next++) < texts.size();) encodings[i] = encode(texts[i], options);
  };
  std::vector<std::future<void>> helpers;
  for (int i = 1; i < threads; ++i) helpers.push_back(std::async(std::launch::async, work));
  work();
  for (std::future<void>& helper : helpers) helper.get();
  return encodings;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::vector<std::string> tokens;
  for (const int32_t id : ids) {
    PITH_CHECK(id >= 0 && id < vocab_size(), "token id {} is outside the vocabulary of {}", id,
        vocab_size());
    const std::string& token = state_->tokens[static_cast<size_t>(id)];
    if (token.empty() || (skip_special_tokens && is_special(id))) continue;
    tokens.push_back(token);
  }
  auto scratch = state_->borrow();
  for (const Decoder& decoder : state_->decoders) apply(decoder, tokens, scratch->regex);
  state_->give_back(std::move(scratch));
  return fmt::format("{}", fmt::join(tokens, state_->no_decoder ? " " : ""));
}

int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(state_->tokens.size()); }
std::string Tokenizer::token(int32_t id) const {
  return id >= 0 && id < vocab_size() ? state_->tokens[static_cast<size_t>(id)] : std::string();
}
std::optional<int32_t> Tokenizer::id(std::string_view token) const {
  const auto found = state_->ids.find(std::string(token));
  return found == state_->ids.end() ? std::nullopt : std::optional(found->second);
}
bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && state_->special[static_cast<size_t>(id)];
}
std::optional<int32_t> Tokenizer::bos_id() const { return state_->bos; }
std::optional<int32_t> Tokenizer::eos_id() const { return state_->eos; }
std::optional<int32_t> Tokenizer::pad_id() const { return state_->pad; }
const std::string& Tokenizer::chat_template() const { return state_->chat_template; }
uint64_t Tokenizer::hash() const { return state_->hash; }

StreamingDecoder::StreamingDecoder(Tokenizer tokenizer, bool skip_special_tokens)
    : tokenizer_(std::move(tokenizer)), skip_special_tokens_(skip_special_tokens) {}

std::string StreamingDecoder::push_bytes(int32_t id) {
  const std::string token = tokenizer_.token(id);
  held_ += spelled_bytes(token).value_or(token);
  size_t at = 0;
  bool truncated = false;
  while (at < held_.size()) {
    const int length = utf8_sequence(held_, at, &truncated);
    if (truncated) break;
    at += static_cast<size_t>(std::abs(length));
  }
  std::string text;
  utf8_replace_invalid(std::string_view(held_).substr(0, at), text);
  held_.erase(0, at);
  return text;
}

std::string StreamingDecoder::push(int32_t id) {
  PITH_CHECK(id >= 0 && id < tokenizer_.vocab_size(), "token id {} is outside the vocabulary of {}",
      id, tokenizer_.vocab_size());
  if (skip_special_tokens_ && tokenizer_.is_special(id)) return "";
  if (tokenizer_.state_->decodes_bytes()) return push_bytes(id);
  window_.push_back(id);
  const std::string text = tokenizer_.decode(window_, skip_special_tokens_);
  // A last U+FFFD may be a character in the making; four bytes later it is certain that it is not.
  const bool open = text.ends_with("\uFFFD") && window_.size() - settled_ < 4;
  if (open || text.size() <= emitted_) return "";
  std::string fresh = text.substr(emitted_);
  // The ids that were just completed become the context of the next ones.
  window_.erase(window_.begin(), window_.begin() + static_cast<std::ptrdiff_t>(settled_));
  settled_ = window_.size();
  emitted_ = tokenizer_.decode(window_, skip_special_tokens_).size();
  return fresh;
}

std::string StreamingDecoder::finish() {
  std::string fresh;
  if (tokenizer_.state_->decodes_bytes()) {
    utf8_replace_invalid(held_, fresh);
  } else {
    const std::string text = tokenizer_.decode(window_, skip_special_tokens_);
    if (text.size() > emitted_) fresh = text.substr(emitted_);
  }
  held_.clear();
  window_.clear();
  settled_ = emitted_ = 0;
  return fresh;
}

}  // namespace pith
