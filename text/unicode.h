// UTF-8 and the Unicode facts the tokenizer stands on.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace pith {

// Bytes of the UTF-8 sequence that starts at text[at]: its length if it is well formed, else minus the
// number of bytes that Python's errors="replace" turns into one U+FFFD. `truncated` is set when the
// sequence is ill formed only because the text ends.
int utf8_sequence(std::string_view text, size_t at, bool* truncated = nullptr);

// Length of the well-formed prefix.
size_t utf8_valid_prefix(std::string_view text);

// Replaces every ill-formed sequence by U+FFFD and returns how many there were.
int64_t utf8_replace_invalid(std::string_view text, std::string& out);

// The code point at text[at] of well-formed UTF-8; `at` moves behind it.
char32_t utf8_next(std::string_view text, size_t& at);
void utf8_append(char32_t code, std::string& out);

// GPT-2's printable stand-in for each byte, as a code point, and back (-1: no stand-in).
char32_t byte_to_char(uint8_t byte);
int char_to_byte(char32_t code);

}  // namespace pith
