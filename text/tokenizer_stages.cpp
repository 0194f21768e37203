#include "text/tokenizer_stages.h"

#include <charconv>

namespace pith {
namespace {

using Tokens = std::vector<std::string>;

void normalize(Lowercase, const Text& text, RegexScratch&, Rewriter& out) { lowercase(text, out); }
void normalize(NormalForm form, const Text& text, RegexScratch&, Rewriter& out) {
  normalize(text, form, out);
}
void normalize(const Prepend& n, const Text&, RegexScratch&, Rewriter& out) {
  out.prepend(n.content);
}
void normalize(const Replace& n, const Text& text, RegexScratch& scratch, Rewriter& out) {
  const std::vector<Change> changes = inserted(n.content);
  for_each_match_in(text.text, n.pattern, scratch,
      [&](size_t begin, size_t end) { out.replace(begin, end, changes, end - begin); });
}

void decode(DecodeByteLevel, Tokens& tokens, RegexScratch&) {
  std::string bytes, text;
  for (const std::string& token : tokens)  // what is not spelled in bytes stands for itself
    bytes += spelled_bytes(token).value_or(token);
  utf8_replace_invalid(bytes, text);
  tokens.assign(1, std::move(text));
}

// The byte of "<0x41>", or -1.
int fallback_byte(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  unsigned byte = 0;
  return std::from_chars(&token[3], &token[5], byte, 16).ptr == &token[5] ? static_cast<int>(byte)
                                                                          : -1;
}

// A run of byte tokens is one text when it is UTF-8 as a whole, else one U+FFFD a byte.
void decode(DecodeByteFallback, Tokens& tokens, RegexScratch&) {
  Tokens out;
  std::string run;
  auto flush = [&] {
    if (utf8_valid_prefix(run) < run.size()) {
      out.insert(out.end(), run.size(), "\uFFFD");
    } else if (!run.empty()) {
      out.push_back(run);
    }
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

void decode(DecodeFuse, Tokens& tokens, RegexScratch&) {
  std::string all;
  for (const std::string& token : tokens) all += token;
  tokens.assign(1, std::move(all));
}

void decode(const DecodeStrip& d, Tokens& tokens, RegexScratch&) {
  const size_t size = d.content.size();
  for (std::string& token : tokens) {
    for (size_t i = 0; i < d.start && token.starts_with(d.content); ++i) token.erase(0, size);
    for (size_t i = 0; i < d.stop && token.ends_with(d.content); ++i)
      token.resize(token.size() - size);
  }
}

void decode(const Replace& d, Tokens& tokens, RegexScratch& scratch) {
  for (std::string& token : tokens) {
    std::string out;
    size_t done = 0;
    for_each_match_in(token, d.pattern, scratch, [&](size_t begin, size_t end) {
      out.append(token, done, begin - done).append(d.content);
      done = end;
    });
    token = out.append(token, done);
  }
}

void decode(const DecodeMetaspace& d, Tokens& tokens, RegexScratch&) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    const size_t spaces = i == 0 && d.drops_first ? 0 : 1;
    for (size_t at = 0; (at = tokens[i].find(d.replacement, at)) != std::string::npos; at += spaces)
      tokens[i].replace(at, d.replacement.size(), spaces, ' ');
  }
}

}  // namespace

std::vector<Change> inserted(std::string_view text) {
  std::vector<Change> changes;
  for (size_t at = 0; at < text.size();) changes.push_back({utf8_next(text, at), 1});
  return changes;
}

void apply(const Normalizer& normalizer, const Text& text, RegexScratch& scratch, Rewriter& out) {
  std::visit([&](const auto& n) { normalize(n, text, scratch, out); }, normalizer);
}

void apply(const Decoder& decoder, std::vector<std::string>& tokens, RegexScratch& scratch) {
  std::visit([&](const auto& d) { decode(d, tokens, scratch); }, decoder);
}

}  // namespace pith
