// What a loaded tokenizer consists of. Private to text/.
#pragma once
#include <map>
#include <mutex>

#include "text/bpe.h"
#include "text/tokenizer.h"
#include "text/tokenizer_stages.h"

namespace pith {

struct AddedToken {
  std::string content;
  int32_t id = -1;
  bool special = false, normalized = false, lstrip = false, rstrip = false, single_word = false;
};

// Finds the leftmost, then longest, of a set of strings.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher() = default;
  explicit AddedTokenMatcher(std::vector<std::pair<std::string, const AddedToken*>> tokens);
  // The first match at or behind `from`; nullptr when there is none.
  const AddedToken* find(std::string_view text, size_t from, size_t& begin, size_t& end) const;
  bool empty() const { return patterns_.empty(); }

 private:
  struct Pattern {
    std::string text;
    const AddedToken* token;
    int prefix;  // the longest other pattern that this one begins with, or -1
  };
  const Pattern& at(int i) const { return patterns_[static_cast<size_t>(i)]; }
  std::vector<Pattern> patterns_;  // sorted
  bool starts_[256] = {};
};

struct TokenizerScratch {
  Bpe::Scratch bpe;
  RegexScratch regex;
  std::vector<uint32_t> lengths;
};

// A tokenizer.json of a byte-level BPE whose tokens are spelled in byte_to_char, by id ("": none).
std::string byte_level_json(const std::vector<std::string>& vocabulary,
    const std::vector<std::pair<int32_t, int32_t>>& merges, std::string_view pattern,
    bool ignore_merges, const std::vector<std::pair<std::string, int32_t>>& special);
std::string tokenizer_config_json(std::string_view end_of_text);

struct Tokenizer::State {
  std::string json, config, chat_template_file;  // as they were read: save() writes them back
  std::vector<std::string> tokens;               // by id, added tokens included
  std::unordered_map<std::string, int32_t> ids;
  std::vector<bool> special;
  std::map<int32_t, AddedToken> added;
  AddedTokenMatcher raw_added, normalized_added;

  std::vector<Normalizer> normalizers;
  std::vector<PreTokenizer> pre_tokenizers;
  std::vector<Decoder> decoders;
  bool no_decoder = false;  // tokens are joined with spaces then
  Bpe bpe;
  std::vector<int32_t> prefix, suffix;  // ids that the post-processor puts around a text
  bool trim_offsets = false, trim_keeps_prefix_space = false;
  bool needs_places = false;  // even when the caller asks for no offsets
  bool uses_subject = false;  // some pre-tokenizer matches a regex

  std::optional<int32_t> bos, eos, pad;
  std::string chat_template;
  uint64_t hash = 0;

  // Scratch is lent to one encode at a time, so that caches stay warm between calls.
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<TokenizerScratch>> idle;
  std::unique_ptr<TokenizerScratch> borrow() const;
  void give_back(std::unique_ptr<TokenizerScratch> scratch) const;

  bool decodes_bytes() const;  // the only decoder is ByteLevel

  // Text after all normalizers. `storage` keeps what they wrote.
  Text normalize(Text text, bool track, RegexScratch& scratch,
      std::vector<std::unique_ptr<Rewriter>>& storage) const;
};

}  // namespace pith
