#include "text/tokenizer_stages.h"

#include "text/unicode.h"

namespace pith {
namespace {

template <class... Ts>
struct Overload : Ts... {
  using Ts::operator()...;
};
template <class... Ts>
Overload(Ts...) -> Overload<Ts...>;  // Clang 14 does not deduce it for aggregates

std::string replaced(const Regex& pattern, const std::string& content, const std::string& token,
                     RegexScratch& scratch) {
  std::string subject, out;
  size_t done = 0;
  const bool differs = unicode_substitute(token, subject);
  for_each_match(pattern, differs ? subject : token, scratch, [&](size_t begin, size_t end) {
    out.append(token, done, begin - done);
    out.append(content);
    done = end;
  });
  return out.append(token, done);
}

// The byte of "<0x41>", or -1.
int fallback_byte(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (char c : {token[3], token[4]}) {
    const std::string_view digits = "0123456789ABCDEFabcdef";
    const size_t digit = digits.find(c);
    if (digit == std::string_view::npos) return -1;
    value = value * 16 + static_cast<int>(digit < 16 ? digit : digit - 6);
  }
  return value;
}

// A run of byte tokens is one text when it is UTF-8 as a whole, else one U+FFFD a byte.
void join_fallback_bytes(std::vector<std::string>& tokens) {
  std::vector<std::string> out;
  std::string run;
  auto flush = [&] {
    if (run.empty()) return;
    if (utf8_valid_prefix(run) == run.size()) {
      out.push_back(run);
    } else {
      out.insert(out.end(), run.size(), "\uFFFD");
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

void strip(std::string& token, const DecodeStrip& decoder) {
  std::vector<size_t> starts;  // of each character, and the end
  for (size_t at = 0; at < token.size();) {
    starts.push_back(at);
    utf8_next(token, at);
  }
  starts.push_back(token.size());
  auto is_content = [&](size_t i) {
    size_t at = starts[i];
    return utf8_next(token, at) == decoder.content;
  };
  const size_t count = starts.size() - 1;
  size_t first = 0, last = count;
  while (first < count && first < decoder.start && is_content(first)) ++first;
  while (last > first && count - last < decoder.stop && is_content(last - 1)) --last;
  token = token.substr(starts[first], starts[last] - starts[first]);
}

void unspace(std::string& token, const DecodeMetaspace& decoder, bool first) {
  std::string out;
  for (size_t at = 0; at < token.size();) {
    if (token.compare(at, decoder.replacement.size(), decoder.replacement) == 0) {
      if (!(first && decoder.drops_first)) out += ' ';
      at += decoder.replacement.size();
    } else {
      out += token[at++];
    }
  }
  token = std::move(out);
}

void join(std::vector<std::string>& tokens) {
  std::string all;
  for (const std::string& token : tokens) all += token;
  tokens.assign(1, std::move(all));
}

void bytes_to_text(std::vector<std::string>& tokens) {
  std::string bytes, text;
  for (const std::string& token : tokens) {
    const size_t before = bytes.size();
    for (size_t at = 0; at < token.size();) {
      const int byte = char_to_byte(utf8_next(token, at));
      if (byte < 0) {  // not spelled in the byte alphabet: stands for itself
        bytes.replace(before, std::string::npos, token);
        break;
      }
      bytes += static_cast<char>(byte);
    }
  }
  utf8_replace_invalid(bytes, text);
  tokens.assign(1, std::move(text));
}

}  // namespace

void apply(const Normalizer& normalizer, const Text& text, RegexScratch& scratch, Rewriter& out) {
  std::visit(Overload{
                 [&](const NormalizeForm& n) { normalize(text, n.form, out); },
                 [&](const NormalizeLowercase&) { lowercase(text, out); },
                 [&](const NormalizePrepend& n) { out.prepend(n.content); },
                 [&](const NormalizeReplace& n) {
                   std::string subject;
                   const bool differs = unicode_substitute(text.text, subject);
                   std::vector<Change> changes;
                   for (size_t at = 0; at < n.content.size();)
                     changes.push_back({utf8_next(n.content, at), 1});
                   for_each_match(n.pattern, differs ? subject : text.text, scratch,
                                  [&](size_t begin, size_t end) {
                                    out.replace(begin, end, changes, end - begin);
                                  });
                 },
             },
             normalizer);
}

void apply(const Decoder& decoder, std::vector<std::string>& tokens, RegexScratch& scratch) {
  std::visit(Overload{
                 [&](const DecodeByteLevel&) { bytes_to_text(tokens); },
                 [&](const DecodeByteFallback&) { join_fallback_bytes(tokens); },
                 [&](const DecodeFuse&) { join(tokens); },
                 [&](const DecodeStrip& d) {
                   for (std::string& token : tokens) strip(token, d);
                 },
                 [&](const DecodeReplace& d) {
                   for (std::string& token : tokens)
                     token = replaced(d.pattern, d.content, token, scratch);
                 },
                 [&](const DecodeMetaspace& d) {
                   for (size_t i = 0; i < tokens.size(); ++i) unspace(tokens[i], d, i == 0);
                 },
             },
             decoder);
}

}  // namespace pith
