// What `inspect` knows about a path; `corpus inspect` and `corpus verify` stand on it as well.
#pragma once
#include <cstdint>
#include <string>

namespace pith {

// Prints what the corpus is and what is damaged in it, which ends the command with status 1.
// `quick`: no sums of data.
void inspect_corpus(const std::string& prefix, bool quick);

std::string human_bytes(uint64_t bytes);  // "1.42MB", decimal units
std::string grouped(int64_t number);      // "1,234,567"

}  // namespace pith
