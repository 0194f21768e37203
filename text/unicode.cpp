#include "text/unicode.h"

#include <cstring>

namespace pith {

int utf8_sequence(std::string_view text, size_t at, bool* truncated) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(at);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return -1;
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte has a narrower range after four leads: no overlong forms, surrogates, or > 10FFFF.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (int i = 1; i < length; ++i) {
    if (at + i == text.size()) {
      if (truncated) *truncated = true;
      return -i;
    }
    const uint8_t next = byte(at + i);
    if (next < (i == 1 ? low : 0x80) || next > (i == 1 ? high : 0xBF)) return -i;
  }
  return length;
}

size_t utf8_valid_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight;
    if (at + 8 <= text.size()) {  // most text is runs of ASCII
      std::memcpy(&eight, text.data() + at, 8);
      if (!(eight & 0x8080808080808080ull)) {
        at += 8;
        continue;
      }
    }
    const int length = utf8_sequence(text, at);
    if (length < 0) break;
    at += length;
  }
  return at;
}

int64_t utf8_replace_invalid(std::string_view text, std::string& out) {
  out.clear();
  out.reserve(text.size());
  int64_t replaced = 0;
  while (true) {
    const size_t good = utf8_valid_prefix(text);
    out.append(text.substr(0, good));
    text.remove_prefix(good);
    if (text.empty()) return replaced;
    text.remove_prefix(-utf8_sequence(text, 0));
    out += "\xEF\xBF\xBD";
    ++replaced;
  }
}

char32_t utf8_next(std::string_view text, size_t& at) {
  auto tail = [&](size_t i) { return static_cast<char32_t>(text[at + i] & 0x3F); };
  const uint8_t lead = text[at];
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
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | code >> 6);
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | code >> 12);
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | code >> 18);
    out += static_cast<char>(0x80 | (code >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
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
      character[b] = stands_for_itself(b) ? b : next++;
      byte[character[b]] = b;
    }
  }
};
const ByteAlphabet alphabet;
}  // namespace

char32_t byte_to_char(uint8_t byte) { return alphabet.character[byte]; }
int char_to_byte(char32_t code) { return code < 0x144 ? alphabet.byte[code] : -1; }

}  // namespace pith
