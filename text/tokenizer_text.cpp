#include "text/tokenizer_text.h"

#include "text/unicode.h"

namespace pith {
namespace {

bool is_continuation(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) == 0x80; }

}  // namespace

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

TokenSpan Text::origin_of(size_t at) const { return origin_of(at, at + 1); }

TokenSpan Text::origin_of(size_t begin, size_t end) const {
  if (origin) return {origin[begin].begin, origin[end - 1].end};
  while (begin > 0 && is_continuation(text[begin])) --begin;
  while (end < text.size() && is_continuation(text[end])) ++end;
  return {base + static_cast<uint32_t>(begin), base + static_cast<uint32_t>(end)};
}

void Rewriter::copy(size_t end) {
  text.append(from_.text.substr(copied_, end - copied_));
  if (track_) {
    for (size_t i = copied_; i < end; ++i) origin.push_back(from_.origin_of(i));
  }
  copied_ = end;
}

void Rewriter::replace(size_t begin, size_t end, std::span<const Change> changes, size_t skipped) {
  copy(begin);
  size_t at = begin + skipped;  // in the old text
  auto next_character = [&] {
    if (at < from_.text.size()) utf8_next(from_.text, at);
  };
  for (const Change& change : changes) {
    TokenSpan place;
    if (track_ && change.moved > 0) place = at == 0 ? TokenSpan{} : from_.origin_of(at - 1);
    if (track_ && change.moved <= 0 && at < from_.text.size()) place = from_.origin_of(at);
    for (int moved = change.moved; moved <= 0; ++moved) next_character();
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
  if (track_) origin.insert(origin.end(), added.size(), from_.origin_of(0));
  changed_ = true;
}

void Rewriter::finish() { copy(from_.text.size()); }

Text Rewriter::result() const {
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
