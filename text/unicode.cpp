#include "text/unicode.h"

#include <simdjson.h>
#include <utf8proc.h>

#include <algorithm>
#include <bitset>
#include <cstring>

#include "text/unicode_tables.h"

namespace pith {

int utf8_sequence(std::string_view text, size_t at, bool* truncated) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(at);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return -1;
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte has a narrower range after four leads: not overlong, no surrogate, <= 10FFFF.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (int i = 1; i < length; ++i) {
    if (at + static_cast<size_t>(i) == text.size()) {
      if (truncated) *truncated = true;
      return -i;
    }
    const uint8_t next = byte(at + static_cast<size_t>(i));
    if (next < (i == 1 ? low : 0x80) || next > (i == 1 ? high : 0xBF)) return -i;
  }
  return length;
}

size_t utf8_valid_prefix(std::string_view text) {
  if (simdjson::validate_utf8(text)) return text.size();
  size_t at = 0;
  for (int length; (length = utf8_sequence(text, at)) > 0;) at += static_cast<size_t>(length);
  return at;
}

int64_t utf8_replace_invalid(std::string_view text, std::string& out) {
  out.clear();
  int64_t replaced = 0;
  for (size_t at = utf8_valid_prefix(text), good = 0;; good = at) {
    int length = 0;
    while (at < text.size() && (length = utf8_sequence(text, at)) > 0)
      at += static_cast<size_t>(length);
    out.append(text, good, at - good);
    if (at == text.size()) return replaced;
    at += static_cast<size_t>(-length);
    out += "\uFFFD";
    ++replaced;
  }
}

char32_t utf8_next(std::string_view text, size_t& at) {
  auto tail = [&](size_t i) { return static_cast<char32_t>(text[at + i]) & 0x3Fu; };
  const uint8_t lead = static_cast<uint8_t>(text[at]);
  char32_t code = lead;
  if (lead < 0x80) {
    at += 1;
  } else if (lead < 0xE0) {
    code = (lead & 0x1Fu) << 6 | tail(1);
    at += 2;
  } else if (lead < 0xF0) {
    code = (lead & 0x0Fu) << 12 | tail(1) << 6 | tail(2);
    at += 3;
  } else {
    code = (lead & 0x07u) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3);
    at += 4;
  }
  return code;
}

void utf8_append(char32_t code, std::string& out) {
  utf8proc_uint8_t bytes[4];
  const auto count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes);
  out.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(count));
}

namespace {

// Blocks of 128 code points in which some have a stand-in: most text is dismissed here.
const std::bitset<0x110000 / 128>& stand_in_blocks() {
  static const auto blocks = [] {
    std::bitset<0x110000 / 128> set;
    for (const CodeRange& range : kStandIns) {
      for (char32_t code = range.first; code <= range.last; ++code) set.set(code / 128);
    }
    return set;
  }();
  return blocks;
}

// "Lu", "Nd", ...
std::string_view category(char32_t code) {
  return utf8proc_category_string(static_cast<utf8proc_int32_t>(unicode_stand_in(code)));
}

}  // namespace

char32_t unicode_stand_in(char32_t code) {
  if (code < 0x800 || !stand_in_blocks()[code / 128]) return code;
  const CodeRange* range = find_range(kStandIns, code);
  return range ? range->value : code;
}

bool unicode_stand_ins_respect(char32_t first, char32_t last) {
  return std::all_of(std::begin(kStandIns), std::end(kStandIns), [&](const CodeRange& range) {
    const bool other_inside = first <= range.value && range.value <= last;
    if (other_inside) return first <= range.first && range.last <= last;
    return range.first > last || first > range.last;
  });
}

bool unicode_substitute(std::string_view text, std::string& out) {
  out.clear();
  size_t copied = 0;
  for (size_t at = 0; at < text.size();) {
    if (static_cast<uint8_t>(text[at]) < 0xE0) {  // ASCII, two bytes, or a continuation
      ++at;
      continue;
    }
    const size_t begin = at;
    const char32_t code = utf8_next(text, at), other = unicode_stand_in(code);
    if (other == code) continue;
    out.append(text.substr(copied, begin - copied));
    utf8_append(other, out);
    copied = at;
  }
  if (copied == 0) return false;
  out.append(text.substr(copied));
  return true;
}

bool is_white_space(char32_t code) {
  return (code >= 9 && code <= 13) || code == ' ' || code == 0x85 || code == 0xA0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 ||
         code == 0x202F || code == 0x205F || code == 0x3000;
}

bool is_word(char32_t code) {
  const std::string_view kind = category(code);
  if (kind[0] == 'L' || kind[0] == 'M' || kind == "Nd" || kind == "Nl" || kind == "Pc" ||
      code == 0x200C || code == 0x200D)
    return true;
  // Letters in circles and squares are alphabetic although their category is So.
  return (code >= 0x24B6 && code <= 0x24E9) || (code >= 0x1F130 && code <= 0x1F149) ||
         (code >= 0x1F150 && code <= 0x1F169) || (code >= 0x1F170 && code <= 0x1F189);
}

bool is_numeric(char32_t code) { return category(code)[0] == 'N' || find_range(kNumeric, code); }

bool is_punctuation(char32_t code) {
  if (const CodeRange* range = find_range(kPunctuationDiffers, code)) return range->value == 1;
  if (category(code)[0] == 'P') return true;
  return code < 0x80 && std::strchr("$+<=>^`|~", static_cast<int>(code)) && code != 0;
}

// Bytes that print in Latin-1 stand for themselves; the other 68 are numbered upwards from U+0100.
namespace {
bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}
struct ByteAlphabet {
  char32_t character[256];
  int16_t byte[0x144];
  ByteAlphabet() {
    for (int16_t& b : byte) b = -1;
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      character[b] = stands_for_itself(b) ? static_cast<char32_t>(b) : next++;
      byte[character[b]] = static_cast<int16_t>(b);
    }
  }
};
const ByteAlphabet alphabet;
}  // namespace

char32_t byte_to_char(uint8_t byte) { return alphabet.character[byte]; }

std::optional<std::string> spelled_bytes(std::string_view token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const char32_t code = utf8_next(token, at);
    if (code >= 0x144 || alphabet.byte[code] < 0) return std::nullopt;
    bytes += static_cast<char>(alphabet.byte[code]);
  }
  return bytes;
}

}  // namespace pith
