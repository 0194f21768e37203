// UTF-8 and the Unicode facts the tokenizer stands on.
#pragma once

namespace pith {
size_t utf8_valid_prefix(string_view text); // length of the well-formed prefix
// Replaces every ill-formed sequence by U+FFFD, counted as by Python's errors="replace".
int64_t utf8_replace_invalid(string_view text, string& out);

// The code point behind or before text[at] of well-formed UTF-8; `at` moves over it.
inline char32_t utf8_next(string_view text, size_t& at) {
  auto next = [&] { return uint8_t(text[at++]); };
  const uint8_t lead = next();
  if (lead < 0x80) return lead;
  char32_t code = lead & (lead < 0xE0 ? 0x1Fu : lead < 0xF0 ? 0x0Fu : 0x07u);
  if (lead >= 0xF0) code = code << 6 | (next() & 0x3Fu);
  if (lead >= 0xE0) code = code << 6 | (next() & 0x3Fu);
  return code << 6 | (next() & 0x3Fu);
}
char32_t utf8_previous(string_view text, size_t& at);
inline bool utf8_continues(char byte) { return (uint8_t(byte) & 0xC0) == 0x80; }
void utf8_append(char32_t code, string& out);

// Hugging Face's regex engine knows a newer Unicode than PCRE2 and utf8proc. A younger code point
// is matched through a stand-in: one of the same category and UTF-8 length that all of them know.
// Is every code point in first..last exactly when its stand-in is?
bool unicode_stand_ins_respect(char32_t first, char32_t last);
// Copies `text` with stand-ins in place; false: nothing needs one.
bool unicode_substitute(string_view text, string& out);
bool unicode_is_inert(char32_t code); // too young for Hugging Face's normaliser, which keeps it
char32_t unicode_lower(char32_t code);
bool is_white_space(char32_t code);
// What is a word to Hugging Face, as members of a regex class.
inline constexpr string_view kWordMembers =
  "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{200C}\\x{200D}\\x{24B6}-\\x{24E9}"
  "\\x{1F130}-\\x{1F149}\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}";

// Bytes in GPT-2's printable stand-ins, and the bytes of a token that is spelled in them.
string spell_bytes(string_view bytes);
optional<string> spelled_bytes(string_view token);
}
