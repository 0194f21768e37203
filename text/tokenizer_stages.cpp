// What happens to text before the model, and to tokens when they are decoded.
#include <utf8proc.h>
#include "text/tokenizer_state.h"

namespace pith {
TokenSpan Text::origin_of(size_t begin, size_t end) const {
  if (origin) return {origin[begin].begin, origin[end - 1].end};
  while (begin > 0 && utf8_continues(text[begin])) --begin;
  while (end < text.size() && utf8_continues(text[end])) ++end;
  return {base + uint32_t(begin), base + uint32_t(end)};
}

void Rewriter::copy(size_t end) {
  text_.append(from_.text.substr(copied_, end - copied_));
  for (size_t i = copied_; track_ && i < end; ++i) origin_.push_back(from_.origin_of(i, i + 1));
  copied_ = end;
}

void Rewriter::replace(size_t begin, size_t end, span<const Change> changes, size_t skipped) {
  copy(begin);
  size_t at = begin + skipped; // in the old text
  for (const Change& change: changes) {
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

Text Rewriter::finish() {
  if (!changed_) return from_;
  copy(from_.text.size());
  return {text_, track_ ? origin_.data() : nullptr, from_.base};
}

namespace {
// --- Hugging Face's forms and lower case, with its places: only changes are written ---

struct Mark : Change {
  int order; // canonical combining class
};

int combining_order(char32_t code) {
  if (code < 0x300 || unicode_is_inert(code)) return 0;
  return utf8proc_get_property(utf8proc_int32_t(code))->combining_class;
}

void decompose(char32_t code, bool compatible, vector<Mark>& out) {
  utf8proc_int32_t parts[32] = {utf8proc_int32_t(code)};
  int bound = 0;
  const auto options = utf8proc_option_t(UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0));
  utf8proc_ssize_t count = 1;
  if (code >= 0xA0 && !unicode_is_inert(code))
    count = utf8proc_decompose_char(parts[0], parts, 32, options, &bound);
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    const auto part = char32_t(parts[i]);
    out.push_back({{part, i > 0}, combining_order(part)});
  }
}

optional<char32_t> compose(char32_t first, char32_t second) {
  utf8proc_int32_t pair[3] = {utf8proc_int32_t(first), utf8proc_int32_t(second), 0};
  const auto options = utf8proc_option_t(UTF8PROC_COMPOSE | UTF8PROC_STABLE);
  if (utf8proc_normalize_utf32(pair, 2, options) != 1) return nullopt;
  const auto composed = char32_t(pair[0]);
  return unicode_is_inert(composed) ? nullopt : optional(composed);
}

// Composition after UAX #15: a mark joins the last starter unless a mark of its class or higher, or
// another starter, stands between.
void compose_all(vector<Mark>& marks) {
  vector<Mark> out;
  size_t starter = SIZE_MAX; // index in out
  for (const Mark& mark: marks) {
    const bool reaches = starter + 1 == out.size() || out.back().order < mark.order;
    optional<char32_t> composed;
    if (starter != SIZE_MAX && reaches) composed = compose(out[starter].code, mark.code);
    if (composed) {
      out[starter].code = *composed;
      out[starter].moved += mark.moved - 1;
    } else {
      if (mark.order == 0) starter = out.size();
      out.push_back(mark);
    }
  }
  marks.swap(out);
}

// Code points that may change, or change others, in a form. All others are borders for it.
using CodeSet = std::bitset<0x110000>;

const CodeSet& active_codes(NormalForm form) {
  static CodeSet sets[2][2];
  static std::once_flag made[2][2];
  CodeSet& active = sets[form.composes][form.compatible];
  std::call_once(made[form.composes][form.compatible], [&] {
    vector<Mark> parts, canonical;
    for (char32_t code = 0xA0; code < 0x110000; ++code) {
      if (code >= 0xD800 && code < 0xE000) continue;
      parts.clear();
      decompose(code, form.compatible, parts);
      const auto changes = [&] { return parts.size() > 1 || parts[0].code != code; };
      if (form.composes && changes()) {
        compose_all(parts);
        // Whatever ends a canonical decomposition can be the second half of a composition.
        canonical.clear();
        decompose(code, false, canonical);
        for (size_t k = 1; k < canonical.size(); ++k) active.set(canonical[k].code);
      }
      if (changes() || combining_order(code) != 0) active.set(code);
    }
  });
  return active;
}

void rewrite(const NormalForm& form, const Text& text, Rewriter& out) {
  const CodeSet& active = active_codes(form);
  const string_view s = text.text;
  vector<Mark> marks;
  string changed;
  size_t border = 0; // start of the last character that is no active one
  for (size_t at = 0; at < s.size();) {
    const size_t begin = at;
    if (uint8_t(s[at]) < 0x80) {
      border = at++;
      continue;
    }
    if (!active[utf8_next(s, at)]) {
      border = begin;
      continue;
    }
    size_t end = at; // take every active character that follows, too
    for (size_t next = at; next < s.size() && active[utf8_next(s, next)];) end = next;
    marks.clear();
    for (size_t i = border; i < end;) decompose(utf8_next(s, i), form.compatible, marks);
    for (auto run = marks.begin(); run != marks.end();) { // sort each run of marks by class
      const auto stop = ranges::find(run, marks.end(), 0, &Mark::order);
      ranges::stable_sort(run, stop, {}, &Mark::order);
      run = stop == marks.end() ? stop : stop + 1;
    }
    if (form.composes) compose_all(marks);
    changed.clear();
    for (const Mark& mark: marks) utf8_append(mark.code, changed);
    if (changed != s.substr(border, end - border))
      out.replace(border, end, vector<Change>(marks.begin(), marks.end()));
    border = at = end;
  }
}

void rewrite(const Lowercase&, const Text& text, Rewriter& out) {
  for (size_t at = 0; at < text.text.size();) {
    const size_t begin = at;
    const char32_t code = utf8_next(text.text, at);
    const bool two = code == 0x130; // I with dot: the one letter that becomes two
    const Change lower[2] = {{two ? U'i' : unicode_lower(code), 0}, {0x307, 1}};
    if (lower[0].code != code) out.replace(begin, at, {lower, two ? 2u : 1u});
  }
}

vector<Change> new_text(string_view content) {
  vector<Change> changes;
  for (size_t at = 0; at < content.size();) changes.push_back({utf8_next(content, at), 1});
  return changes;
}

void rewrite(const Replace& replace, const Text& text, Rewriter& out) {
  const vector<Change> changes = new_text(replace.content);
  replace.pattern.for_each_match(
    text.text, [&](size_t begin, size_t end) { out.replace(begin, end, changes, end - begin); });
}

void rewrite(const Prepend& prepend, const Text& text, Rewriter& out) {
  const bool there = prepend.unless_there && text.text.starts_with(prepend.content);
  if (there || (prepend.only_at_start && text.base > 0) || text.text.empty()) return;
  vector<Change> changes = new_text(prepend.content);
  if (!changes.empty()) changes[0].moved = 0; // all at the place of the first character
  out.replace(0, 0, changes);
}

void rewrite(const Split&, const Text&, Rewriter&) {}

// --- decoders ---

using Tokens = vector<string>;

void decode(DecodeFuse, Tokens& tokens) {
  tokens.assign(1, std::accumulate(tokens.begin(), tokens.end(), string()));
}

void decode(DecodeByteLevel, Tokens& tokens) {
  string text;
  for (string& token: tokens) // what is not spelled in bytes stands for itself
    if (auto bytes = spelled_bytes(token)) token.swap(*bytes);
  decode(DecodeFuse(), tokens);
  utf8_replace_invalid(tokens[0], text);
  tokens[0].swap(text);
}

// A run of byte tokens is one text when it is UTF-8 as a whole, else one U+FFFD a byte.
void decode(DecodeByteFallback, Tokens& tokens) {
  Tokens out;
  string run;
  auto flush = [&] {
    if (utf8_valid_prefix(run) < run.size()) out.insert(out.end(), run.size(), "\uFFFD");
    else if (!run.empty()) out.push_back(run);
    run.clear();
  };
  for (string& token: tokens) {
    const int byte = fallback_byte(token);
    if (byte >= 0) {
      run += char(byte);
    } else {
      flush();
      out.push_back(std::move(token));
    }
  }
  flush();
  tokens.swap(out);
}

void decode(const DecodeReplace& decoder, Tokens& tokens) {
  const Replace first{decoder.pattern, decoder.drops_first ? "" : decoder.content};
  for (size_t i = 0; i < tokens.size(); ++i) {
    Rewriter out({tokens[i]}, false);
    rewrite(i > 0 ? decoder : first, {tokens[i]}, out);
    tokens[i] = string(out.finish().text);
  }
}
}

Text apply(const Stage& stage, const Text& text, Rewriter& out) {
  std::visit([&](const auto& what) { rewrite(what, text, out); }, stage);
  return out.finish();
}

void apply(const Decoder& decoder, vector<string>& tokens) {
  std::visit([&](const auto& d) { decode(d, tokens); }, decoder);
}

int fallback_byte(const string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int byte = 0;
  return from_chars(&token[3], &token[5], byte, 16).ptr == &token[5] ? byte : -1;
}
}
