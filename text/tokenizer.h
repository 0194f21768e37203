// From text to token ids and back: any BPE tokenizer.json, the ids of Hugging Face `tokenizers`.
#pragma once

namespace pith {
struct EncodeOptions {
  bool add_special_tokens = true; // what the file's post-processor adds, usually a start token
  bool parse_special = true; // special tokens spelled in the text become their ids
  bool offsets = false; // fill Encoding::offsets
  bool strict = false; // refuse ill-formed UTF-8 instead of replacing it by U+FFFD
};

// Bytes [begin, end) of the input with U+FFFD for ill-formed UTF-8. A part of a character covers
// all of it; tokens that a post-processor adds have {0, 0}.
struct TokenSpan {
  uint32_t begin = 0, end = 0;
  bool operator==(const TokenSpan&) const = default;
};

struct Encoding {
  vector<int32_t> ids;
  vector<TokenSpan> offsets; // one a token, empty unless EncodeOptions::offsets
  int64_t replaced_sequences = 0; // ill-formed UTF-8 sequences that were read as U+FFFD
  int64_t dropped_characters = 0; // outside a vocabulary that has neither unk nor byte tokens
};

// Immutable and cheap to copy; many threads may use it at once.
class Tokenizer {
 public:
  // A tokenizer.json, or a folder with one and perhaps a tokenizer_config.json. A component that is
  // not supported is refused by its name.
  static Tokenizer load(const fs::path& path);
  static Tokenizer from_json(string tokenizer_json, string tokenizer_config = "");
  static Tokenizer bytes(); // ids 0..255 are the bytes, 256 is <|endoftext|>

  // Writes tokenizer.json and tokenizer_config.json; the files load in Python too.
  void save(const fs::path& folder) const;

  Encoding encode(string_view text, const EncodeOptions& options = {}) const;
  // Bytes that are not UTF-8 come out as U+FFFD. Ids outside the vocabulary are an error.
  string decode(span<const int32_t> ids, bool skip_special_tokens = true) const;

  int64_t vocab_size() const; // largest id + 1, added tokens included
  string token(int32_t id) const; // as the file spells it; "" for an unused id
  optional<int32_t> id(string_view token) const;
  bool is_special(int32_t id) const;
  optional<int32_t> bos_id() const, eos_id() const, pad_id() const;
  const string& chat_template() const; // "" when tokenizer_config.json has none
  uint64_t hash() const; // of the content, not of the file's layout

  struct State; // private to text/
 private:
  friend class StreamingDecoder;
  explicit Tokenizer(shared_ptr<const State> state) : state_(std::move(state)) {}
  shared_ptr<const State> state_;
};

// Text as it becomes certain while ids arrive: never half a character, all together that of decode.
class StreamingDecoder {
 public:
  explicit StreamingDecoder(Tokenizer tokenizer) : tokenizer_(std::move(tokenizer)) {}
  string push(int32_t id); // the text that this id completes, often ""
  string finish(); // what was held back; incomplete characters become U+FFFD
 private:
  Tokenizer tokenizer_;
  vector<int32_t> window_; // ids that give context, then ids that wait
  size_t settled_ = 0; // how many of them give context
  size_t emitted_ = 0; // bytes of decode(window_) that were given out
};

// Words with an optional leading space, numbers up to three digits, runs of punctuation, line ends.
inline constexpr string_view kDefaultPattern =
  "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}{1,3}"
  "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

struct BpeTrainerOptions {
  int64_t vocab_size = 8192; // special tokens and the 256 bytes included
  int64_t min_frequency = 0; // a pair seen less often is not merged
  string pattern{kDefaultPattern}; // how text is cut into pieces
  vector<string> special_tokens = {"<|endoftext|>"}; // ids 0, 1, ...; the first is eos
  int threads = 1;
};

// A byte-level BPE: the merges of Hugging Face's BpeTrainer for the same text and settings.
class BpeTrainer {
 public:
  explicit BpeTrainer(BpeTrainerOptions options);
  // Counts the pieces of some texts, whatever their order.
  void add(span<const string> texts);
  // Learns the merges. Ties go to the smaller left id, then the smaller right id.
  Tokenizer train() const;
 private:
  using Counts = unordered_map<string, int64_t>;
  BpeTrainerOptions options_;
  vector<Counts> counts_; // one a thread
};
}
