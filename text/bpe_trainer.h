// Trains a byte-level BPE: the merges of Hugging Face's BpeTrainer for the same text and settings.
#pragma once
#include "text/tokenizer.h"

namespace pith {

// Words with an optional leading space, numbers up to three digits, runs of punctuation, line ends.
inline constexpr std::string_view kDefaultPattern =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

struct BpeTrainerOptions {
  int64_t vocab_size = 8192;             // special tokens and the 256 bytes included
  int64_t min_frequency = 0;             // a pair seen less often is not merged
  std::string pattern{kDefaultPattern};  // how text is cut into pieces
  std::vector<std::string> special_tokens = {"<|endoftext|>"};  // ids 0, 1, ...; the first is eos
  int threads = 1;
};

class BpeTrainer {
 public:
  explicit BpeTrainer(BpeTrainerOptions options);
  // Counts the pieces of some texts. Neither their order nor how they are batched matters.
  void add(std::span<const std::string> texts);
  // Learns the merges. Ties go to the smaller left id, then the smaller right id.
  Tokenizer train() const;
 private:
  using Counts = std::unordered_map<std::string, int64_t>;
  BpeTrainerOptions options_;
  std::vector<Counts> counts_;  // one a thread
};

}  // namespace pith
