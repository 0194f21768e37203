#include <charconv>

#include "text/tokenizer_state.h"

namespace pith {

TokenSpan Text::origin_of(size_t begin, size_t end) const {
  if (origin) return {origin[begin].begin, origin[end - 1].end};
  while (begin > 0 && utf8_continues(text[begin])) --begin;
  while (end < text.size() && utf8_continues(text[end])) ++end;
  return {base + static_cast<uint32_t>(begin), base + static_cast<uint32_t>(end)};
}

void Rewriter::copy(size_t end) {
  text_.append(from_.text.substr(copied_, end - copied_));
  if (track_ && from_.origin)
    origin_.insert(origin_.end(), from_.origin + copied_, from_.origin + end);
  else if (track_)
    for (size_t i = copied_; i < end; ++i) origin_.push_back(from_.origin_of(i, i + 1));
  copied_ = end;
}

void Rewriter::replace(size_t begin, size_t end, std::span<const Change> changes, size_t skipped) {
  copy(begin);
  size_t at = begin + skipped;  // in the old text
  for (const Change& change : changes) {
    TokenSpan place{from_.base, from_.base};
    if (track_ && change.moved > 0 && at > 0) place = from_.origin_of(at - 1, at);
    if (track_ && change.moved <= 0 && at < from_.text.size()) place = from_.origin_of(at, at + 1);
    for (int moved = change.moved; moved <= 0 && at < from_.text.size(); ++moved)
      utf8_next(from_.text, at);
    const size_t before = text_.size();
    utf8_append(change.code, text_);
    if (track_) origin_.insert(origin_.end(), text_.size() - before, place);
  }
  copied_ = end;
  changed_ = true;
}

void Rewriter::prepend(std::string_view added) {
  if (from_.text.empty()) return;
  text_.append(added);
  if (track_) origin_.insert(origin_.end(), added.size(), from_.origin_of(0, 1));
  changed_ = true;
}

Text Rewriter::finish() {
  if (!changed_) return from_;
  copy(from_.text.size());
  return {text_, track_ ? origin_.data() : nullptr, from_.base};
}

Text apply(const Stage& stage, const Text& text, Rewriter& out) {
  if (const auto* form = std::get_if<NormalForm>(&stage)) {
    normalize(text, *form, out);
  } else if (std::holds_alternative<Lowercase>(stage)) {
    lowercase(text, out);
  } else if (const auto* replace = std::get_if<Replace>(&stage)) {
    std::vector<Change> changes;
    for (size_t at = 0; at < replace->content.size();)
      changes.push_back({utf8_next(replace->content, at), 1});
    replace->pattern.for_each_match(text.text,
        [&](size_t begin, size_t end) { out.replace(begin, end, changes, end - begin); });
  } else if (const auto* prepend = std::get_if<Prepend>(&stage)) {
    const bool there = prepend->unless_there && text.text.starts_with(prepend->content);
    if (!there && !(prepend->only_at_start && text.base > 0)) out.prepend(prepend->content);
  }
  return out.finish();
}

int fallback_byte(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int byte = 0;
  return std::from_chars(&token[3], &token[5], byte, 16).ptr == &token[5] ? byte : -1;
}

namespace {

using Tokens = std::vector<std::string>;

void fuse(Tokens& tokens) {
  std::string all;
  for (const std::string& token : tokens) all += token;
  tokens.assign(1, std::move(all));
}

void decode(DecodeFuse, Tokens& tokens) { fuse(tokens); }

void decode(DecodeByteLevel, Tokens& tokens) {
  std::string text;
  for (std::string& token : tokens)  // what is not spelled in bytes stands for itself
    if (auto bytes = spelled_bytes(token)) token.swap(*bytes);
  fuse(tokens);
  utf8_replace_invalid(tokens[0], text);
  tokens[0].swap(text);
}

// A run of byte tokens is one text when it is UTF-8 as a whole, else one U+FFFD a byte.
void decode(DecodeByteFallback, Tokens& tokens) {
  Tokens out;
  std::string run;
  auto flush = [&] {
    if (utf8_valid_prefix(run) < run.size())
      out.insert(out.end(), run.size(), "\uFFFD");
    else if (!run.empty())
      out.push_back(run);
    run.clear();
  };
  for (std::string& token : tokens) {
    const int byte = fallback_byte(token);
    if (byte >= 0) {
      run += static_cast<char>(byte);
    } else {
      flush();
      out.push_back(std::move(token));
    }
  }
  flush();
  tokens.swap(out);
}

void decode(const DecodeStrip& d, Tokens& tokens) {
  const size_t size = d.content.size();
  for (std::string& token : tokens) {
    for (size_t i = 0; i < d.start && token.starts_with(d.content); ++i) token.erase(0, size);
    for (size_t i = 0; i < d.stop && token.ends_with(d.content); ++i)
      token.resize(token.size() - size);
  }
}

void decode(const Replace& d, Tokens& tokens) {
  for (std::string& token : tokens) {
    std::string out;
    size_t done = 0;
    d.pattern.for_each_match(token, [&](size_t begin, size_t end) {
      out.append(token, done, begin - done).append(d.content);
      done = end;
    });
    token = out.append(token, done);
  }
}

void decode(const DecodeMetaspace& d, Tokens& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    const size_t spaces = i == 0 && d.drops_first ? 0 : 1;
    for (size_t at = 0; (at = tokens[i].find(d.replacement, at)) != std::string::npos; at += spaces)
      tokens[i].replace(at, d.replacement.size(), spaces, ' ');
  }
}

}  // namespace

void apply(const Decoder& decoder, Tokens& tokens) {
  std::visit([&](const auto& d) { decode(d, tokens); }, decoder);
}

}  // namespace pith
