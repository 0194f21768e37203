#include "text/bpe.h"
#include <xxhash.h>
#include "text/unicode.h"

namespace pith {
Bpe::Bpe(const vector<string>& tokens, const vector<BpeMerge>& merges, Config config)
    : config_(std::move(config)), forms_(tokens.size()) {
  for (size_t id = 0; id < tokens.size(); ++id) {
    // Pieces can never hold a token that is not spelled in the byte alphabet.
    forms_[id] = config_.byte_level ? spelled_bytes(tokens[id]).value_or("") : tokens[id];
    if (!forms_[id].empty()) ids_[forms_[id]] = int32_t(id);
  }
  const string prefix =
    config_.byte_level ? spelled_bytes(config_.prefix).value_or("\xFF\xFF") : config_.prefix;
  for (int byte = 0; byte < 256; ++byte) {
    byte_ids_[0][byte] = id_of(string(1, char(byte)));
    byte_ids_[1][byte] = id_of(prefix + char(byte));
    fallback_ids_[byte] = config_.byte_level ? -1 : id_of(fmt::format("<0x{:02X}>", byte));
    PITH_CHECK(!(config_.byte_level && config_.byte_fallback && byte_ids_[0][byte] < 0),
      "byte_fallback with a byte-level vocabulary that lacks byte {} is not supported", byte);
  }
  shift_ = 64 - int(std::bit_width(max<size_t>(merges.size() * 2, 2)));
  merges_.resize(size_t{1} << (64 - shift_));
  for (const BpeMerge& m: merges) // of a pair that is listed twice the last counts
    merges_[place(m.left, m.right)] = {pair_key(m.left, m.right), m.rank, m.merged};

  // Parts of a piece are independent where symbols depend on nothing before them.
  const bool independent = config_.prefix.empty() && !config_.ignore_merges &&
    (ranges::min(config_.byte_level ? byte_ids_[0] : fallback_ids_) >= 0 ||
      (config_.unk_id >= 0 && !config_.fuse_unk));
  set<int32_t> stand_ins(fallback_ids_, fallback_ids_ + 256);
  stand_ins.insert(config_.unk_id);
  const bool joined = ranges::any_of(merges,
    [&](const BpeMerge& m) { return stand_ins.contains(m.left) || stand_ins.contains(m.right); });
  if (!independent || joined) return;
  joints_.resize(kJoints);
  for (const BpeMerge& m: merges) {
    const auto &left = forms_[index(m.left)], &right = forms_[index(m.right)];
    if (!left.empty() && !right.empty()) joints_[joint(left, right)] = true; // a piece may hold it
  }
}

// The place in joints_ of the border between two texts.
size_t Bpe::joint(string_view before, string_view behind) const {
  size_t first = config_.byte_level ? 1 : 0;
  if (first == 0) utf8_next(behind, first);
  uint64_t key = uint8_t(before.back());
  for (const char byte: behind.substr(0, first)) key = key << 8 | uint8_t(byte);
  return (key * 0x9E3779B97F4A7C15ull) >> (64 - kJointBits);
}

size_t Bpe::place(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right);
  size_t slot = (key * 0x9E3779B97F4A7C15ull) >> shift_;
  while (merges_[slot].pair != key && merges_[slot].pair != kEmpty)
    slot = (slot + 1) & (merges_.size() - 1);
  return slot;
}

int32_t Bpe::id_of(string_view form) const {
  const auto found = ids_.find(form);
  return found == ids_.end() ? -1 : found->second;
}

void Bpe::split_into_symbols(string_view piece, Scratch& scratch) const {
  auto& symbols = scratch.symbols;
  symbols.clear();
  uint32_t unknown = 0; // bytes waiting to become one unk token
  uint32_t dropped = 0; // bytes that the next symbol takes along
  auto add = [&](int32_t id, uint32_t length) {
    symbols.push_back({id, length + dropped});
    dropped = 0;
  };
  string spelled;
  auto spell = [&](size_t begin, size_t end) -> const string& {
    spelled.assign(begin > 0 ? config_.prefix : "");
    return spelled.append(piece.substr(begin, end - begin));
  };
  for (size_t at = 0; at < piece.size();) {
    const size_t begin = at;
    int32_t id;
    if (config_.byte_level || uint8_t(piece[at]) < 0x80) {
      id = byte_ids_[begin > 0][uint8_t(piece[at++])];
    } else {
      utf8_next(piece, at);
      id = id_of(spell(begin, at));
    }
    const auto length = uint32_t(at - begin);
    if (id >= 0) {
      if (unknown) add(config_.unk_id, exchange(unknown, 0));
      add(id, length);
      continue;
    }
    if (config_.byte_fallback) {
      spell(begin, at);
      if (std::all_of(spelled.begin(), spelled.end(),
            [&](char c) { return fallback_ids_[uint8_t(c)] >= 0; })) {
        for (char c: spelled) add(fallback_ids_[uint8_t(c)], 1);
        continue;
      }
    }
    if (config_.unk_id < 0) {
      dropped += length;
      ++scratch.dropped;
    } else {
      if (unknown && !config_.fuse_unk) add(config_.unk_id, exchange(unknown, 0));
      unknown += length;
    }
  }
  if (unknown) add(config_.unk_id, unknown);
  if (dropped && !symbols.empty()) symbols.back().length += dropped;
}

// Merges the leftmost pair of the lowest rank until none is left. Symbols are a linked list in
// place. Up to kShort are scanned for the best pair; for more a heap of (rank, place), some entries
// outdated, gives it in n log n altogether.
void Bpe::merge(Scratch& scratch) const {
  constexpr size_t kShort = 64;
  auto& symbols = scratch.symbols;
  auto& ranks = scratch.ranks;
  auto& heap = scratch.heap;
  const auto count = uint32_t(symbols.size());
  const bool is_long = count > kShort;
  ranks.resize(count);
  heap.clear();
  auto look_up = [&](uint32_t i) { // the pair of i and the symbol behind it
    auto& symbol = symbols[i];
    static const Slot none;
    const Slot& slot = symbol.next == count ? none : find(symbol.id, symbols[symbol.next].id);
    ranks[i] = slot.rank;
    symbol.merged = slot.merged;
    if (!is_long || slot.rank == kNoRank) return;
    heap.push_back(uint64_t(slot.rank) << 32 | i);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  for (uint32_t i = 0; i < count; ++i) {
    symbols[i].previous = i - 1;
    symbols[i].next = i + 1;
    look_up(i);
  }
  auto best = [&]() -> uint32_t {
    if (!is_long) {
      uint32_t lowest = kNoRank; // two loops, of which compilers vectorise the first
      for (const uint32_t rank: ranks) lowest = min(lowest, rank);
      return uint32_t(std::find(ranks.begin(), ranks.end(), lowest) - ranks.begin());
    }
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      const uint64_t top = heap.back();
      heap.pop_back();
      if (ranks[uint32_t(top)] == top >> 32) return uint32_t(top);
    }
    return count - 1; // which has no pair
  };
  for (uint32_t i = best(); ranks[i] != kNoRank; i = best()) {
    auto& [id, length, merged, previous, next] = symbols[i];
    id = merged;
    length += exchange(symbols[next].length, 0);
    ranks[next] = kNoRank;
    next = symbols[next].next;
    if (next < count) symbols[next].previous = i;
    if (i > 0) look_up(previous);
    look_up(i);
  }
  std::erase_if(symbols, [](const Scratch::Symbol& symbol) { return symbol.length == 0; });
}

// A long piece is encoded part by part between borders that no merge crosses: short parts are found
// in the cache, and a piece may be a whole document (tokenizers without a pre-tokenizer).
void Bpe::encode(
  string_view piece, Scratch& scratch, vector<int32_t>& ids, vector<uint32_t>* lengths) const {
  if (!joints_.empty() && piece.size() > Scratch::kKeyBytes) {
    size_t begin = 0;
    for (size_t at = 1; at < piece.size(); ++at) {
      const bool inside = !config_.byte_level && utf8_continues(piece[at]);
      if (inside || joints_[joint(piece.substr(0, at), piece.substr(at))]) continue;
      encode_part(piece.substr(begin, at - begin), scratch, ids, lengths);
      begin = at;
    }
    piece.remove_prefix(begin);
  }
  if (!piece.empty()) encode_part(piece, scratch, ids, lengths);
}

void Bpe::encode_part(
  string_view piece, Scratch& scratch, vector<int32_t>& ids, vector<uint32_t>* lengths) const {
  Scratch::Entry* entry = nullptr;
  if (piece.size() <= Scratch::kKeyBytes) {
    const uint64_t hash = XXH3_64bits(piece.data(), piece.size());
    entry = &scratch.cache[hash % Scratch::kCacheSize];
    if (entry->key_size == piece.size() && !std::memcmp(entry->key, piece.data(), piece.size())) {
      ids.insert(ids.end(), entry->ids, entry->ids + entry->count);
      if (lengths) lengths->insert(lengths->end(), entry->lengths, entry->lengths + entry->count);
      return;
    }
  }
  auto& symbols = scratch.symbols;
  const int32_t whole = config_.ignore_merges ? id_of(piece) : -1;
  const int64_t dropped_before = scratch.dropped;
  if (whole >= 0) {
    symbols.assign(1, {whole, uint32_t(piece.size())});
  } else {
    split_into_symbols(piece, scratch);
    if (symbols.size() > 1) merge(scratch);
  }
  for (const Scratch::Symbol& symbol: symbols) {
    ids.push_back(symbol.id);
    if (lengths) lengths->push_back(symbol.length);
  }
  if (entry && symbols.size() <= Scratch::kCachedTokens && scratch.dropped == dropped_before) {
    std::memcpy(entry->key, piece.data(), piece.size());
    entry->key_size = uint8_t(piece.size());
    entry->count = uint8_t(symbols.size());
    for (size_t i = 0; i < symbols.size(); ++i) {
      entry->ids[i] = symbols[i].id;
      entry->lengths[i] = uint8_t(symbols[i].length);
    }
  }
}
}
