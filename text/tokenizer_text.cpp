#include "text/tokenizer_text.h"

#include "text/unicode.h"

namespace pith {

Text Text::slice(size_t begin, size_t end) const {
  Text part{text.substr(begin, end - begin), subject.substr(begin, end - begin)};
  part.at_start = at_start && begin == 0;
  if (origin) {
    part.origin = origin + begin;
    part.at_start = begin < end && part.origin->begin == 0 && at_start;
  } else {
    part.base = base + static_cast<uint32_t>(begin);
  }
  return part;
}

TokenSpan Text::origin_of(size_t begin, size_t end) const {
  if (origin) return {origin[begin].begin, origin[end - 1].end};
  while (begin > 0 && utf8_continues(text[begin])) --begin;
  while (end < text.size() && utf8_continues(text[end])) ++end;
  return {base + static_cast<uint32_t>(begin), base + static_cast<uint32_t>(end)};
}

void Rewriter::copy(size_t end) {
  text.append(from_.text.substr(copied_, end - copied_));
  if (track_) {
    for (size_t i = copied_; i < end; ++i) origin.push_back(from_.origin_of(i, i + 1));
  }
  copied_ = end;
}

void Rewriter::replace(size_t begin, size_t end, std::span<const Change> changes, size_t skipped) {
  copy(begin);
  size_t at = begin + skipped;  // in the old text
  for (const Change& change : changes) {
    TokenSpan place;
    if (track_ && change.moved > 0) place = at == 0 ? TokenSpan{} : from_.origin_of(at - 1, at);
    if (track_ && change.moved <= 0 && at < from_.text.size()) place = from_.origin_of(at, at + 1);
    for (int moved = change.moved; moved <= 0 && at < from_.text.size(); ++moved)
      utf8_next(from_.text, at);
    const size_t before = text.size();
    utf8_append(change.code, text);
    if (track_) origin.insert(origin.end(), text.size() - before, place);
  }
  copied_ = end;
  changed_ = true;
}

void Rewriter::prepend(std::string_view added) {
  if (from_.text.empty()) return;
  text.append(added);
  if (track_) origin.insert(origin.end(), added.size(), from_.origin_of(0, 1));
  changed_ = true;
}

Text Rewriter::finish() {
  copy(from_.text.size());
  Text view{text, text};
  view.at_start = from_.at_start;
  if (track_) {
    view.origin = origin.data();
    view.at_start = !origin.empty() && origin[0].begin == 0 && from_.at_start;
  } else {
    view.base = from_.base;
  }
  return view;
}

}  // namespace pith
