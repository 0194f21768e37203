#include "text/unicode.h"
#include <simdjson.h>
#include <utf8proc.h>
#include "text/unicode_tables.h"

namespace pith {
namespace {
// Bytes of the well-formed sequence that begins `text`, 0 where none does.
size_t sequence_length(string_view text) {
  utf8proc_int32_t code;
  const auto length = utf8proc_iterate(
    reinterpret_cast<const utf8proc_uint8_t*>(text.data()), utf8proc_ssize_t(text.size()), &code);
  return length > 0 ? index(length) : 0;
}

// Bytes that Python's errors="replace" turns into one U+FFFD: all that more bytes could complete.
size_t ill_formed_length(string_view text) {
  for (size_t size = min<size_t>(text.size(), 3); size > 1; --size)
    if (sequence_length(string(text.substr(0, size)).append(4 - size, '\x80'))) return size;
  return 1;
}

using Table = unordered_map<char32_t, uint32_t>;

Table read_table(string_view text) { // of unicode_tables.h
  Table table;
  std::istringstream in{string(text)};
  in >> std::hex;
  for (uint32_t value = 0, first = 0; in >> first;) {
    uint32_t last = first;
    const int separator = in.get();
    if (separator == '-') in >> last;
    if (separator == ':') value = first;
    else
      for (uint32_t code = first; code <= last; ++code) table[code] = value;
  }
  return table;
}

const Table stand_ins = read_table(kStandIns);
const Table inert = read_table(kInert);
const Table lower_delta = read_table(kLowerDelta);

// Blocks of 128 code points in which some have a stand-in: most text is dismissed here.
const auto stand_in_blocks = [] {
  std::bitset<0x110000 / 128> blocks;
  for (const auto& [code, stand_in]: stand_ins) blocks.set(code / 128);
  return blocks;
}();

// Bytes that print in Latin-1 stand for themselves; the other 68 are numbered upwards from U+0100.
struct ByteAlphabet {
  char32_t character[256];
  int16_t byte[0x144];
  ByteAlphabet() {
    ranges::fill(byte, int16_t{-1});
    char32_t next = 0x100;
    for (int16_t b = 0; b < 256; ++b) {
      const bool prints = (b > 0x20 && b < 0x7F) || (b > 0xA0 && b != 0xAD);
      character[b] = prints ? char32_t(b) : next++;
      byte[character[b]] = b;
    }
  }
};
const ByteAlphabet alphabet;
}

size_t utf8_valid_prefix(string_view text) {
  if (simdjson::validate_utf8(text)) return text.size();
  size_t at = 0;
  while (const size_t length = sequence_length(text.substr(at))) at += length;
  return at;
}

int64_t utf8_replace_invalid(string_view text, string& out) {
  out.clear();
  for (int64_t replaced = 0;; ++replaced) {
    const size_t good = utf8_valid_prefix(text);
    out.append(text, 0, good);
    if (good == text.size()) return replaced;
    out += "\uFFFD";
    text.remove_prefix(good + ill_formed_length(text.substr(good)));
  }
}

char32_t utf8_previous(string_view text, size_t& at) {
  do --at;
  while (at > 0 && utf8_continues(text[at]));
  size_t next = at;
  return utf8_next(text, next);
}

void utf8_append(char32_t code, string& out) {
  utf8proc_uint8_t bytes[4];
  const auto count = utf8proc_encode_char(utf8proc_int32_t(code), bytes);
  out.append(reinterpret_cast<const char*>(bytes), index(count));
}

static char32_t unicode_stand_in(char32_t code) {
  if (code < 0x800 || !stand_in_blocks[code / 128]) return code;
  const auto found = stand_ins.find(code);
  return found == stand_ins.end() ? code : found->second;
}

bool unicode_stand_ins_respect(char32_t first, char32_t last) {
  const auto holds = [&](char32_t code) { return first <= code && code <= last; };
  return last < 0x800 || ranges::all_of(stand_ins, [&](const auto& pair) {
    return holds(pair.first) == holds(pair.second);
  });
}

bool unicode_substitute(string_view text, string& out) {
  uint8_t highest = 0; // a loop that compilers vectorise: most text ends here
  for (const char byte: text) highest = max(highest, uint8_t(byte));
  if (highest < 0xE0) return false;
  out.clear();
  size_t copied = 0;
  for (size_t at = 0; at < text.size();) {
    if (uint8_t(text[at]) < 0xE0) { // ASCII, two bytes, or a continuation
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
  if (copied > 0) out.append(text.substr(copied));
  return copied > 0;
}

bool unicode_is_inert(char32_t code) {
  return inert.contains(code) || unicode_stand_in(code) != code;
}

char32_t unicode_lower(char32_t code) {
  if (const auto found = lower_delta.find(code); found != lower_delta.end())
    return code + found->second;
  return char32_t(utf8proc_tolower(utf8proc_int32_t(code)));
}

bool is_white_space(char32_t code) {
  const auto category = utf8proc_category(utf8proc_int32_t(unicode_stand_in(code)));
  return (code >= 9 && code <= 13) || code == 0x85 || category == UTF8PROC_CATEGORY_ZS ||
    category == UTF8PROC_CATEGORY_ZL || category == UTF8PROC_CATEGORY_ZP;
}

string spell_bytes(string_view bytes) {
  string token;
  for (const char byte: bytes) utf8_append(alphabet.character[uint8_t(byte)], token);
  return token;
}

optional<string> spelled_bytes(string_view token) {
  string bytes;
  for (size_t at = 0; at < token.size();) {
    const char32_t code = utf8_next(token, at);
    if (code >= 0x144 || alphabet.byte[code] < 0) return nullopt;
    bytes += char(alphabet.byte[code]);
  }
  return bytes;
}
}
