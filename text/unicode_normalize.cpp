#include <utf8proc.h>

#include <algorithm>
#include <bitset>
#include <mutex>
#include <optional>

#include "text/tokenizer_state.h"

namespace pith {
namespace {

struct Mark {
  char32_t code;
  int moved;
  int order;  // canonical combining class
};

bool composes(NormalForm form) { return form == NormalForm::kNfc || form == NormalForm::kNfkc; }
bool compatible(NormalForm form) { return form == NormalForm::kNfkc || form == NormalForm::kNfkd; }

int combining_order(char32_t code) {
  if (code < 0x300 || unicode_is_inert(code)) return 0;
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(code))->combining_class;
}

void decompose(char32_t code, bool compatibility, std::vector<Mark>& out) {
  utf8proc_int32_t parts[32] = {static_cast<utf8proc_int32_t>(code)};
  int bound = 0;
  const auto options =
      static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | (compatibility ? UTF8PROC_COMPAT : 0));
  utf8proc_ssize_t count = 1;
  if (code >= 0xA0 && !unicode_is_inert(code))
    count = utf8proc_decompose_char(parts[0], parts, 32, options, &bound);
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    const auto part = static_cast<char32_t>(parts[i]);
    out.push_back({part, i > 0, combining_order(part)});
  }
}

std::optional<char32_t> compose(char32_t first, char32_t second) {
  utf8proc_int32_t pair[3] = {
      static_cast<utf8proc_int32_t>(first), static_cast<utf8proc_int32_t>(second), 0};
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE);
  if (utf8proc_normalize_utf32(pair, 2, options) != 1) return std::nullopt;
  const auto composed = static_cast<char32_t>(pair[0]);
  return unicode_is_inert(composed) ? std::nullopt : std::optional(composed);
}

// Composition after UAX #15: a mark joins the last starter unless a mark of its class or higher, or
// another starter, stands between.
void compose_all(std::vector<Mark>& marks) {
  std::vector<Mark> out;
  size_t starter = SIZE_MAX;  // index in out
  for (const Mark& mark : marks) {
    const bool reaches = starter + 1 == out.size() || out.back().order < mark.order;
    std::optional<char32_t> composed;
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
  static CodeSet sets[4];
  static std::once_flag made[4];
  const auto i = static_cast<size_t>(form);
  std::call_once(made[i], [&active = sets[i], form] {
    std::vector<Mark> parts, canonical;
    for (char32_t code = 0xA0; code < 0x110000; ++code) {
      if (code >= 0xD800 && code < 0xE000) continue;
      if (combining_order(code) != 0) active.set(code);
      parts.clear();
      decompose(code, compatible(form), parts);
      if (parts.size() == 1 && parts[0].code == code) continue;
      if (composes(form)) {
        compose_all(parts);
        // Whatever ends a canonical decomposition can be the second half of a composition.
        canonical.clear();
        decompose(code, false, canonical);
        for (size_t k = 1; k < canonical.size(); ++k) active.set(canonical[k].code);
      }
      if (parts.size() > 1 || parts[0].code != code) active.set(code);
    }
  });
  return sets[i];
}

}  // namespace

void normalize(const Text& text, NormalForm form, Rewriter& out) {
  const CodeSet& active = active_codes(form);
  const std::string_view s = text.text;
  std::vector<Mark> marks;
  std::vector<Change> changes;
  std::string changed;
  size_t border = 0;  // start of the last character that is no active one
  for (size_t at = 0; at < s.size();) {
    const size_t begin = at;
    if (static_cast<uint8_t>(s[at]) < 0x80) {
      border = at++;
      continue;
    }
    if (!active[utf8_next(s, at)]) {
      border = begin;
      continue;
    }
    size_t end = at;  // take every active character that follows, too
    for (size_t next = at; next < s.size() && active[utf8_next(s, next)];) end = next;
    marks.clear();
    for (size_t i = border; i < end;) decompose(utf8_next(s, i), compatible(form), marks);
    for (auto run = marks.begin(); run != marks.end();) {  // sort each run of marks by class
      const auto stop = std::ranges::find(run, marks.end(), 0, &Mark::order);
      std::stable_sort(run, stop, [](const Mark& a, const Mark& b) { return a.order < b.order; });
      run = stop == marks.end() ? stop : stop + 1;
    }
    if (composes(form)) compose_all(marks);
    changes.clear();
    changed.clear();
    for (const Mark& mark : marks) {
      changes.push_back({mark.code, mark.moved});
      utf8_append(mark.code, changed);
    }
    if (changed != s.substr(border, end - border)) out.replace(border, end, changes);
    border = at = end;
  }
}

void lowercase(const Text& text, Rewriter& out) {
  for (size_t at = 0; at < text.text.size();) {
    const size_t begin = at;
    const char32_t code = utf8_next(text.text, at);
    const bool two = code == 0x130;  // I with dot: the one letter that becomes two
    const Change lower[2] = {{two ? U'i' : unicode_lower(code), 0}, {0x307, 1}};
    if (lower[0].code != code) out.replace(begin, at, {lower, two ? 2u : 1u});
  }
}

}  // namespace pith
