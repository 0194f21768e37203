#include "text/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>

#include "core/error.h"
#include "text/tokenizer_state.h"
#include "text/unicode.h"

namespace pith {

AddedTokenMatcher::AddedTokenMatcher(
    std::vector<std::pair<std::string, const AddedToken*>> patterns)
    : patterns_(std::move(patterns)) {
  std::erase_if(patterns_, [](const auto& pattern) { return pattern.first.empty(); });
  std::sort(patterns_.begin(), patterns_.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& pattern : patterns_) starts_[static_cast<uint8_t>(pattern.first[0])] = true;
}

const AddedToken* AddedTokenMatcher::find(std::string_view text, size_t from, size_t& begin,
                                          size_t& end) const {
  for (begin = from; begin < text.size(); ++begin) {
    if (!starts_[static_cast<uint8_t>(text[begin])]) continue;
    // Narrow the sorted patterns byte by byte; the last one that ends on the way is the longest.
    auto low = patterns_.begin(), high = patterns_.end();
    const AddedToken* longest = nullptr;
    for (size_t depth = 0; low != high && begin + depth < text.size(); ++depth) {
      const auto byte = static_cast<uint8_t>(text[begin + depth]);
      auto byte_at = [&](const auto& pattern) {
        return depth < pattern.first.size() ? static_cast<uint8_t>(pattern.first[depth]) : -1;
      };
      low = std::partition_point(low, high, [&](const auto& p) { return byte_at(p) < byte; });
      high = std::partition_point(low, high, [&](const auto& p) { return byte_at(p) <= byte; });
      if (low != high && low->first.size() == depth + 1) {
        longest = low->second;
        end = begin + depth + 1;
      }
    }
    if (longest) return longest;
  }
  return nullptr;
}

std::unique_ptr<TokenizerScratch> Tokenizer::State::borrow() const {
  {
    const std::lock_guard lock(mutex);
    if (!idle.empty()) {
      auto scratch = std::move(idle.back());
      idle.pop_back();
      return scratch;
    }
  }
  return std::make_unique<TokenizerScratch>();
}

void Tokenizer::State::give_back(std::unique_ptr<TokenizerScratch> scratch) const {
  const std::lock_guard lock(mutex);
  idle.push_back(std::move(scratch));
}

bool Tokenizer::State::decodes_bytes() const {
  return decoders.size() == 1 && std::holds_alternative<DecodeByteLevel>(decoders[0]);
}

// Added tokens are spelled in letters, but read like all others where that is possible.
std::string Tokenizer::State::decoded_bytes(int32_t id) const {
  const std::string& token = tokens[static_cast<size_t>(id)];
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const int byte = char_to_byte(utf8_next(token, at));
    if (byte < 0) return token;
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

Text Tokenizer::State::normalize(Text text, bool track, RegexScratch& scratch,
                                 std::vector<std::unique_ptr<Rewriter>>& storage) const {
  for (const Normalizer& normalizer : normalizers) {
    auto out = std::make_unique<Rewriter>(text, track);
    apply(normalizer, text, scratch, *out);
    if (!out->changed()) continue;
    out->finish();
    text = out->result();
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
      if (options_.offsets) place_added(text, begin, end);
      done = end;
      from = std::max(from, end);
    }
    if (done < s.size()) rest(text.slice(done, s.size()));
  }

  static size_t previous(std::string_view s, size_t at) {
    do --at;
    while (at > 0 && (static_cast<uint8_t>(s[at]) & 0xC0) == 0x80);
    return at;
  }
  static bool word_ends_at(std::string_view s, size_t at) {
    if (at == 0) return false;
    size_t before = previous(s, at);
    return is_word(utf8_next(s, before));
  }
  static bool word_starts_at(std::string_view s, size_t at) {
    return at < s.size() && is_word(utf8_next(s, at));
  }
  static size_t space_before(std::string_view s, size_t at) {
    while (at > 0) {
      const size_t before = previous(s, at);
      size_t next = before;
      if (!is_white_space(utf8_next(s, next))) break;
      at = before;
    }
    return at;
  }
  static size_t space_behind(std::string_view s, size_t at) {
    while (at < s.size()) {
      size_t next = at;
      if (!is_white_space(utf8_next(s, next))) break;
      at = next;
    }
    return at;
  }

  void normalize(const Text& part) {
    std::vector<std::unique_ptr<Rewriter>> storage;
    const Text text = state_.normalize(part, track(), scratch_.regex, storage);
    split_at_added(state_.normalized_added, text, [&](Text rest) {
      std::string subject;
      set_subject(rest, subject);
      pre_tokenize(0, rest);
    });
  }

  void set_subject(Text& text, std::string& storage) const {
    text.subject = text.text;
    if (state_.uses_subject && unicode_substitute(text.text, storage)) text.subject = storage;
  }

  void pre_tokenize(size_t stage, const Text& text) {
    if (text.text.empty()) return;
    if (stage == state_.pre_tokenizers.size()) return model(text);
    std::visit([&](const auto& splitter) { split(splitter, stage, text); },
               state_.pre_tokenizers[stage]);
  }

  auto pieces_to(size_t stage, const Text& text) {
    return [this, stage, &text](size_t begin, size_t end) {
      if (begin < end) pre_tokenize(stage, text.slice(begin, end));
    };
  }

  void split_matches(const Regex& pattern, SplitBehavior behavior, bool invert, size_t stage,
                     const Text& text) {
    Splitter splitter(behavior, invert, pieces_to(stage + 1, text));
    for_each_match(pattern, text.subject, scratch_.regex,
                   [&](size_t begin, size_t end) { splitter.match(begin, end); });
    splitter.finish(text.text.size());
  }

  template <class Predicate>
  void split_characters(Predicate is_match, SplitBehavior behavior, size_t stage,
                        const Text& text) {
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
    if (s.add_prefix_space && !text.text.starts_with(' ')) {
      Rewriter spaced(text, track());
      spaced.prepend(" ");
      spaced.finish();
      Text changed = spaced.result();
      std::string subject;
      set_subject(changed, subject);
      return split_bytes(s, stage, changed);
    }
    split_bytes(s, stage, text);
  }
  void split_bytes(const SplitByteLevel& s, size_t stage, const Text& text) {
    if (!s.pattern) return pre_tokenize(stage + 1, text);
    split_matches(*s.pattern, SplitBehavior::kIsolated, false, stage, text);
  }

  void split(const SplitDigits& s, size_t stage, const Text& text) {
    split_characters(is_numeric,
                     s.individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous, stage,
                     text);
  }
  void split(const SplitPunctuation& s, size_t stage, const Text& text) {
    split_characters(is_punctuation, s.behavior, stage, text);
  }

  void split(const SplitWhitespace& s, size_t stage, const Text& text) {
    if (!s.words) return split_characters(is_white_space, SplitBehavior::kRemoved, stage, text);
    // Runs of words and runs of anything else but space; kind 0 is space and is dropped.
    size_t begin = 0;
    int kind = 0;
    auto flush = [&](size_t end) {
      if (kind != 0 && begin < end) pre_tokenize(stage + 1, text.slice(begin, end));
      begin = end;
    };
    for (size_t at = 0; at < text.text.size();) {
      const size_t start = at;
      const char32_t code = utf8_next(text.text, at);
      const int now = is_word(code) ? 1 : is_white_space(code) ? 0 : 2;
      if (now != kind) flush(start);
      kind = now;
    }
    flush(text.text.size());
  }

  void split(const SplitMetaspace& s, size_t stage, const Text& text) {
    Rewriter spaced(text, track());
    const bool starts = text.text.starts_with(' ') || text.text.starts_with(s.replacement);
    const bool wanted = s.prepend == SplitMetaspace::Prepend::kAlways ||
                        (s.prepend == SplitMetaspace::Prepend::kFirst && text.at_start);
    if (wanted && !starts) spaced.prepend(s.replacement);
    std::vector<Change> changes;
    for (size_t at = 0; at < s.replacement.size();)
      changes.push_back({utf8_next(s.replacement, at), 1});
    for (size_t at = text.text.find(' '); at != std::string_view::npos;
         at = text.text.find(' ', at + 1)) {
      spaced.replace(at, at + 1, changes, 1);
    }
    spaced.finish();
    Text changed = spaced.result();
    std::string subject;
    set_subject(changed, subject);
    if (!s.split) return pre_tokenize(stage + 1, changed);
    Splitter splitter(SplitBehavior::kMergedWithNext, false, pieces_to(stage + 1, changed));
    for (size_t at = changed.text.find(s.replacement); at != std::string_view::npos;
         at = changed.text.find(s.replacement, at + s.replacement.size())) {
      splitter.match(at, at + s.replacement.size());
    }
    splitter.finish(changed.text.size());
  }

  void model(const Text& text) {
    if (!options_.offsets) {
      return state_.bpe.encode(text.text, scratch_.bpe, out_.ids, nullptr);
    }
    scratch_.lengths.clear();
    state_.bpe.encode(text.text, scratch_.bpe, out_.ids, &scratch_.lengths);
    size_t begin = 0;
    for (const uint32_t length : scratch_.lengths) {
      TokenSpan span = text.origin_of(begin, begin + length);
      if (state_.trim_offsets) trim(span, text.text.substr(begin, length), state_.bpe.byte_level());
      out_.offsets.push_back(span);
      begin += length;
    }
  }

  void place_added(const Text& text, size_t begin, size_t end) {
    TokenSpan span = text.origin_of(begin, end);
    if (state_.trim_offsets) trim(span, text.text.substr(begin, end - begin), false);
    out_.offsets.push_back(span);
  }

  // Takes the spaces at both ends of a token out of its span. A lone space before the first word
  // may be one that encoding added, which is not in the text.
  void trim(TokenSpan& span, std::string_view token, bool bytes) const {
    const bool first = out_.offsets.empty() || span.begin == 0;
    auto is_space = [&](char32_t code) {
      return bytes ? code == ' ' : is_white_space(code) || code == 0x120;
    };
    auto character = [&](size_t at) -> char32_t {
      return bytes ? static_cast<uint8_t>(token[at]) : utf8_next(token, at);
    };
    auto step = [&](size_t at) {
      if (bytes) return at + 1;
      utf8_next(token, at);
      return at;
    };
    size_t leading = 0, trailing = 0;
    for (size_t at = 0; at < token.size() && is_space(character(at)); at = step(at)) ++leading;
    for (size_t at = token.size(); at > 0; ++trailing) {
      at = bytes ? at - 1 : previous(token, at);
      if (!is_space(character(at))) break;
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

std::vector<Encoding> Tokenizer::encode_batch(std::span<const std::string> texts, int threads,
                                              const EncodeOptions& options) const {
  std::vector<Encoding> encodings(texts.size());
  std::atomic<size_t> next = 0;
  std::exception_ptr failure;
  std::mutex failure_mutex;
  auto work = [&] {
    try {
      for (size_t i = next++; i < texts.size(); i = next++)
        encodings[i] = encode(texts[i], options);
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      if (!failure) failure = std::current_exception();
      next = texts.size();
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (int i = 1; i < threads; ++i) helpers.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);
  return encodings;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  const bool bytes = state_->decodes_bytes();
  std::vector<std::string> tokens;
  std::string text, joined;
  for (const int32_t id : ids) {
    PITH_CHECK(id >= 0 && id < vocab_size(), "token id {} is outside the vocabulary of {}", id,
               vocab_size());
    if (skip_special_tokens && is_special(id)) continue;
    const std::string& token = state_->tokens[static_cast<size_t>(id)];
    if (bytes) {
      joined += state_->decoded_bytes(id);
    } else if (!token.empty()) {
      tokens.push_back(token);
    }
  }
  if (bytes) {
    utf8_replace_invalid(joined, text);
    return text;
  }
  auto scratch = state_->borrow();
  for (const Decoder& decoder : state_->decoders) apply(decoder, tokens, scratch->regex);
  state_->give_back(std::move(scratch));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (state_->no_decoder && i > 0) text += ' ';
    text += tokens[i];
  }
  return text;
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
  held_ += tokenizer_.state_->decoded_bytes(id);
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
