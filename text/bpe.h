// The byte pair encoding model: from a piece of text to ids.
#pragma once

namespace pith {
struct BpeMerge {
  int32_t left, right, merged;
  uint32_t rank; // lower merges first; equal ranks from left to right
};

// Orders pairs of ids by the left id, then the right one.
inline uint64_t pair_key(int32_t left, int32_t right) {
  return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
}

class Bpe {
 public:
  struct Config {
    bool byte_level = false; // pieces are bytes, the vocabulary is spelled in byte_to_char
    bool ignore_merges = false; // a piece that is a token needs no merges
    bool byte_fallback = false; // characters outside the vocabulary become <0xNN> tokens
    bool fuse_unk = false;
    int32_t unk_id = -1;
    string prefix; // of symbols that do not begin a piece
  };

  static constexpr uint32_t kNoRank = ~0u;

  // One thread's buffers and its memory of recent pieces.
  struct Scratch {
    static constexpr size_t kCacheSize = 1 << 15, kKeyBytes = 32, kCachedTokens = 6;
    struct alignas(64) Entry {
      char key[kKeyBytes];
      int32_t ids[kCachedTokens];
      uint8_t lengths[kCachedTokens];
      uint8_t key_size = 0, count = 0;
    };
    struct Symbol {
      int32_t id;
      uint32_t length; // bytes of the piece
      // Of its pair with the symbol behind it, and its neighbours, while merging:
      int32_t merged = -1;
      uint32_t previous = 0, next = 0;
    };
    int64_t dropped = 0; // characters that no token stands for
    vector<Entry> cache = vector<Entry>(kCacheSize);
    vector<Symbol> symbols;
    vector<uint32_t> ranks; // of the symbols' pairs
    vector<uint64_t> heap;
  };

  Bpe() = default;
  Bpe(Bpe&&) = default; // ids_ views forms_: it survives a move, not a copy
  Bpe& operator=(Bpe&&) = default;
  // `tokens` is indexed by id, "" where an id is not the model's.
  Bpe(const vector<string>& tokens, const vector<BpeMerge>& merges, Config config);

  // Appends the ids of a piece and, unless null, the bytes each of them covers.
  void encode(
    string_view piece, Scratch& scratch, vector<int32_t>& ids, vector<uint32_t>* lengths) const;
 private:
  struct Slot {
    uint64_t pair = kEmpty;
    uint32_t rank = kNoRank;
    int32_t merged = -1;
  };
  static constexpr uint64_t kEmpty = ~0ull;
  static constexpr int kJointBits = 18;
  static constexpr size_t kJoints = size_t{1} << kJointBits;

  size_t place(int32_t left, int32_t right) const; // in merges_
  const Slot& find(int32_t left, int32_t right) const { return merges_[place(left, right)]; }
  int32_t id_of(string_view form) const; // -1: none
  size_t joint(string_view before, string_view behind) const;
  void encode_part(
    string_view part, Scratch& scratch, vector<int32_t>& ids, vector<uint32_t>* lengths) const;
  void split_into_symbols(string_view piece, Scratch& scratch) const;
  void merge(Scratch& scratch) const;

  Config config_;
  vector<string> forms_; // bytes when byte_level, else the spelling
  unordered_map<string_view, int32_t> ids_; // views forms_
  vector<Slot> merges_;
  int shift_ = 63;
  // Hashed (last byte, first character) of what some merge joins; empty: unused.
  vector<bool> joints_;
  int32_t byte_ids_[2][256]; // of the first and of later symbols of a piece
  int32_t fallback_ids_[256];
};
}
