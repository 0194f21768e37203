#include "text/tokenizer.h"
#include "text/tokenizer_state.h"

namespace pith {
const AddedToken* AddedTokenMatcher::find(
  string_view text, size_t from, size_t& begin, size_t& end) const {
  if (tokens_.empty()) return nullptr;
  for (begin = from; begin < text.size(); ++begin) {
    if (!starts_[uint8_t(text[begin])]) continue;
    // The longest token that begins `rest` is the last that does not sort behind it; or, where
    // that one goes on differently, begins what they share.
    for (string_view rest = text.substr(begin);;) {
      const auto behind = tokens_.upper_bound(rest);
      if (behind == tokens_.begin()) break;
      const auto& [token_text, token] = *std::prev(behind);
      const auto differ = ranges::mismatch(token_text, rest);
      rest = {rest.begin(), differ.in2};
      if (differ.in1 != token_text.end()) continue;
      end = begin + rest.size();
      return token;
    }
  }
  return nullptr;
}

const string& Tokenizer::State::spelling(int32_t id) const {
  PITH_CHECK(id >= 0 && index(id) < tokens.size(), "token id {} is outside the vocabulary of {}",
    id, tokens.size());
  return tokens[index(id)];
}

namespace {
// One text on its way through the stages. Pieces go depth first, so nothing but ids grows.
struct Encoder {
  const Tokenizer::State& state;
  const EncodeOptions& options;
  Bpe::Scratch& scratch;
  Encoding& out;
  string_view input;
  vector<uint32_t> lengths = {};

  void run() {
    PITH_CHECK(input.size() < UINT32_MAX, "a text of {} bytes is too long", input.size());
    const bool track = options.offsets || state.needs_places;
    split_at_added(state.raw_added, {input}, [&](const Text& part) {
      std::list<Rewriter> storage;
      split_at_added(state.normalized_added, state.normalize(part, track, storage),
        [&](const Text& rest) { pre_tokenize(0, rest, track); });
    });
  }

  // Emits the added tokens in `text` and gives what lies between them to `rest`.
  template <class Rest>
  void split_at_added(const AddedTokenMatcher& matcher, const Text& text, Rest rest) {
    size_t done = 0, begin = 0, end = 0;
    const string_view s = text.text;
    while (const AddedToken* token = matcher.find(s, end, begin, end)) {
      if (token->special && !options.parse_special) continue;
      if (token->single_word && is_inside_word(s, begin, end)) continue;
      if (token->lstrip)
        for (size_t at = begin; at > done && is_white_space(utf8_previous(s, at));) begin = at;
      if (token->rstrip)
        for (size_t at = end; at < s.size() && is_white_space(utf8_next(s, at));) end = at;
      if (done < begin) rest(text.slice(done, begin));
      out.ids.push_back(token->id);
      if (options.offsets) place(text, begin, end, false);
      done = end;
    }
    if (done < s.size()) rest(text.slice(done, s.size()));
  }

  static bool is_inside_word(string_view s, size_t begin, size_t end) {
    static const Regex word(fmt::format("[{}]", kWordMembers));
    size_t before = begin, behind = end;
    if (begin > 0) utf8_previous(s, before);
    if (end < s.size()) utf8_next(s, behind);
    bool found = false;
    for (const auto side: {s.substr(before, begin - before), s.substr(end, behind - end)})
      word.for_each_match(side, [&](size_t, size_t) { found = true; });
    return found;
  }

  void pre_tokenize(size_t stage, const Text& text, bool track) {
    if (stage == state.pre_tokenizers.size()) return model(text);
    if (const auto* split = std::get_if<Split>(&state.pre_tokenizers[stage])) {
      split_text(*split, text.text,
        [&](size_t begin, size_t end) { pre_tokenize(stage + 1, text.slice(begin, end), track); });
    } else {
      Rewriter rewriter(text, track);
      pre_tokenize(stage + 1, apply(state.pre_tokenizers[stage], text, rewriter), track);
    }
  }

  void model(const Text& text) {
    if (!options.offsets) return state.bpe.encode(text.text, scratch, out.ids, nullptr);
    lengths.clear();
    state.bpe.encode(text.text, scratch, out.ids, &lengths);
    size_t begin = 0;
    for (const uint32_t length: lengths) {
      place(text, begin, begin + length, state.byte_level);
      begin += length;
    }
  }

  void place(const Text& text, size_t begin, size_t end, bool bytes) {
    TokenSpan span = text.origin_of(begin, end);
    if (state.trim_offsets) trim(span, text.text.substr(begin, end - begin), bytes);
    out.offsets.push_back(span);
  }

  // Takes the spaces at both ends of a token out of its span. A lone space before the first word
  // may be one that encoding added, which is not in the text.
  void trim(TokenSpan& span, string_view token, bool bytes) const {
    const bool first = out.offsets.empty() || span.begin == 0;
    size_t leading = 0, trailing = 0;
    if (bytes) {
      leading = min(token.find_first_not_of(' '), token.size());
      trailing = token.size() - (token.find_last_not_of(' ') + 1);
    } else {
      auto is_space = [](char32_t code) { return is_white_space(code) || code == 0x120; };
      for (size_t at = 0; at < token.size() && is_space(utf8_next(token, at));) ++leading;
      for (size_t at = token.size(); at > 0 && is_space(utf8_previous(token, at));) ++trailing;
    }
    if (first && state.trim_keeps_prefix_space && leading == 1) leading = 0;
    size_t begin = span.begin, end = span.end;
    for (; leading > 0 && begin < end; --leading) utf8_next(input, begin);
    for (; trailing > 0 && end > begin; --trailing) utf8_previous(input, end);
    span = {uint32_t(begin), uint32_t(end)};
  }
};
}

Encoding Tokenizer::encode(string_view input, const EncodeOptions& options) const {
  Encoding encoding;
  string repaired;
  if (const size_t good = utf8_valid_prefix(input); good < input.size()) {
    PITH_CHECK(
      !options.strict, "text is not UTF-8: byte {} is 0x{:02X}", good, uint8_t(input[good]));
    encoding.replaced_sequences = utf8_replace_invalid(input, repaired);
    input = repaired;
  }
  unique_ptr<Bpe::Scratch> scratch;
  if (const lock_guard lock(state_->mutex); !state_->idle.empty()) {
    scratch = std::move(state_->idle.back());
    state_->idle.pop_back();
  }
  if (!scratch) scratch = make_unique<Bpe::Scratch>();
  scratch->dropped = 0;
  Encoder{*state_, options, *scratch, encoding, input}.run();
  encoding.dropped_characters = scratch->dropped;
  PITH_CHECK(!options.strict || encoding.dropped_characters == 0,
    "{} characters of the text have no token", encoding.dropped_characters);
  {
    const lock_guard lock(state_->mutex);
    state_->idle.push_back(std::move(scratch));
  }
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

string Tokenizer::decode(span<const int32_t> ids, bool skip_special_tokens) const {
  vector<string> tokens;
  for (const int32_t id: ids) {
    const string& token = state_->spelling(id);
    if (!token.empty() && !(skip_special_tokens && is_special(id))) tokens.push_back(token);
  }
  for (const Decoder& decoder: state_->decoders) apply(decoder, tokens);
  return fmt::format("{}", fmt::join(tokens, state_->no_decoder ? " " : ""));
}

int64_t Tokenizer::vocab_size() const { return int64_t(state_->tokens.size()); }
string Tokenizer::token(int32_t id) const {
  return id >= 0 && id < vocab_size() ? state_->tokens[index(id)] : string();
}
optional<int32_t> Tokenizer::id(string_view token) const { return state_->find(token); }
bool Tokenizer::is_special(int32_t id) const {
  const auto found = state_->added.find(id);
  return found != state_->added.end() && found->second.special;
}
optional<int32_t> Tokenizer::bos_id() const { return state_->bos; }
optional<int32_t> Tokenizer::eos_id() const { return state_->eos; }
optional<int32_t> Tokenizer::pad_id() const { return state_->pad; }
const string& Tokenizer::chat_template() const { return state_->chat_template; }
uint64_t Tokenizer::hash() const { return state_->hash; }

string StreamingDecoder::push(int32_t id) {
  const string& token = tokenizer_.state_->spelling(id);
  if (token.empty() || tokenizer_.is_special(id)) return "";
  window_.push_back(id);
  // What a byte token means depends on the whole run; a last U+FFFD may be half a character.
  if (fallback_byte(token) >= 0) return "";
  const string text = tokenizer_.decode(window_);
  if (text.ends_with("\uFFFD") || text.size() <= emitted_) return "";
  // The ids that were just completed become the context of the next ones.
  window_.erase(window_.begin(), window_.begin() + std::ptrdiff_t(settled_));
  settled_ = window_.size();
  string fresh = text.substr(emitted_);
  emitted_ = tokenizer_.decode(window_).size();
  return fresh;
}

string StreamingDecoder::finish() {
  const string text = tokenizer_.decode(window_);
  const size_t emitted = min(exchange(emitted_, 0), text.size());
  window_.clear();
  settled_ = 0;
  return text.substr(emitted);
}
}
