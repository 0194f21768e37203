// What `inspect` knows about a path; `corpus inspect` and `corpus verify` stand on it as well.
#pragma once
#include <string>
#include <vector>

#include "engine/corpus.h"

namespace pith {

// Prints what the corpus is, then returns what is damaged in it (empty = sound). `quick`: no sums
// of data.
std::vector<std::string> describe_corpus(const std::string& prefix, bool quick);

// Prints the problems, then ends the command with status 1 if there are any.
void report_damage(const std::vector<std::string>& problems);

std::vector<int32_t> document_ids(const Corpus& corpus, int64_t document);

std::string human_bytes(uint64_t bytes);  // "1.42 MB", decimal units
std::string grouped(int64_t number);      // "1,234,567"

}  // namespace pith
