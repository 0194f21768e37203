// pithtrain corpus build: text to corpus, continued where it was when it is interrupted.
#pragma once
#include "text/corpus_encoder.h"

namespace pith {

struct CorpusBuildOptions {
  std::vector<std::string> paths, endings;
  std::string out, validation_out, tokenizer;  // tokenizer: file or folder, "" = bytes
  std::optional<std::string> end_token;        // default: the tokenizer's; "" = none
  EncodeSettings encode;                       // its text, lengths, workers
  std::optional<uint64_t> seed;                // shuffles documents
  double validation_share = 0;
  uint64_t max_bytes = 0, memory = uint64_t{1} << 30;
  int64_t shard_tokens = 0, max_bad = 100;
  bool keep_duplicates = false, restart = false;
};

// Unfinished work lies in OUT.build/ and in *.tmp files beside the outputs. A journal, often
// renewed, names the input position and the sizes of all outputs at one moment; after any
// interruption the outputs are cut back to it. So the result does not depend on interruptions, nor
// on the number of workers. Other options or changed inputs are refused by name until `restart`.
// Shuffling is a second pass over the finished, unshuffled corpus in OUT.build/.
void build_corpus(CorpusBuildOptions options);

}  // namespace pith
