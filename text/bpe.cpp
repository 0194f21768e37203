#include "text/bpe.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <utility>

#include "core/error.h"
#include "text/unicode.h"

namespace pith {
namespace {

// Pieces up to this many symbols are merged by plain scanning, longer ones with a heap.
constexpr size_t kShort = 64;
constexpr uint32_t kNone = ~0u;

}  // namespace

Bpe::Bpe(const std::vector<std::string>& tokens, const std::vector<BpeMerge>& merges, Config config)
    : config_(std::move(config)), forms_(tokens.size()) {
  for (size_t id = 0; id < tokens.size(); ++id) {
    // Pieces can never hold a token that is not spelled in the byte alphabet.
    forms_[id] = config_.byte_level ? spelled_bytes(tokens[id]).value_or("") : tokens[id];
    if (!forms_[id].empty()) ids_[forms_[id]] = static_cast<int32_t>(id);
  }
  const std::string prefix =
      config_.byte_level ? spelled_bytes(config_.prefix).value_or("\xFF\xFF") : config_.prefix;
  for (int byte = 0; byte < 256; ++byte) {
    byte_ids_[0][byte] = id_of(std::string(1, static_cast<char>(byte)));
    byte_ids_[1][byte] = id_of(prefix + static_cast<char>(byte));
    fallback_ids_[byte] = config_.byte_level ? -1 : id_of(fmt::format("<0x{:02X}>", byte));
    PITH_CHECK(!(config_.byte_level && config_.byte_fallback && byte_ids_[0][byte] < 0),
        "byte_fallback with a byte-level vocabulary that lacks byte {} is not supported", byte);
  }
  shift_ = 64 - static_cast<int>(std::bit_width(std::max<size_t>(merges.size() * 2, 2)));
  merges_.resize(size_t{1} << (64 - shift_));
  for (const BpeMerge& m : merges)  // of a pair that is listed twice the last counts
    merges_[place(m.left, m.right)] = {pair_key(m.left, m.right), m.rank, m.merged};
}

size_t Bpe::place(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right);
  size_t slot = (key * 0x9E3779B97F4A7C15ull) >> shift_;
  while (merges_[slot].pair != key && merges_[slot].pair != kEmpty)
    slot = (slot + 1) & (merges_.size() - 1);
  return slot;
}

int32_t Bpe::id_of(std::string_view form) const {
  const auto found = ids_.find(form);
  return found == ids_.end() ? -1 : found->second;
}

void Bpe::split_into_symbols(std::string_view piece, Scratch& scratch) const {
  auto& symbols = scratch.symbols;
  symbols.clear();
  uint32_t unknown = 0;  // bytes waiting to become one unk token
  uint32_t dropped = 0;  // bytes that the next symbol takes along
  auto add = [&](int32_t id, uint32_t length) {
    symbols.push_back({id, length + dropped});
    dropped = 0;
  };
  std::string spelled;
  auto spell = [&](size_t begin, size_t end) -> const std::string& {
    spelled.assign(begin > 0 ? config_.prefix : "");
    return spelled.append(piece.substr(begin, end - begin));
  };
  for (size_t at = 0; at < piece.size();) {
    const size_t begin = at;
    int32_t id;
    if (config_.byte_level || static_cast<uint8_t>(piece[at]) < 0x80) {
      id = byte_ids_[begin > 0][static_cast<uint8_t>(piece[at++])];
    } else {
      utf8_next(piece, at);
      id = id_of(spell(begin, at));
    }
    const auto length = static_cast<uint32_t>(at - begin);
    if (id >= 0) {
      if (unknown) add(config_.unk_id, std::exchange(unknown, 0));
      add(id, length);
      continue;
    }
    if (config_.byte_fallback) {
      spell(begin, at);
      if (std::all_of(spelled.begin(), spelled.end(),
              [&](char c) { return fallback_ids_[static_cast<uint8_t>(c)] >= 0; })) {
        for (char c : spelled) add(fallback_ids_[static_cast<uint8_t>(c)], 1);
        continue;
      }
    }
    if (config_.unk_id < 0) {
      dropped += length;
      ++scratch.dropped;
    } else {
      if (unknown && !config_.fuse_unk) add(config_.unk_id, std::exchange(unknown, 0));
      unknown += length;
    }
  }
  if (unknown) add(config_.unk_id, unknown);
  if (dropped && !symbols.empty()) symbols.back().length += dropped;
}

void Bpe::merge_short(Scratch& scratch) const {
  auto& symbols = scratch.symbols;
  auto& ranks = scratch.ranks;    // of each symbol with the one behind it
  auto& merged = scratch.merged;  // and what they become
  const size_t count = symbols.size();
  ranks.resize(count);
  merged.resize(count);
  auto look_up = [&](size_t i, size_t last) {
    ranks[i] = kNoRank;
    if (i >= last) return;
    const Slot& slot = find(symbols[i].id, symbols[i + 1].id);
    ranks[i] = slot.rank;
    merged[i] = slot.merged;
  };
  size_t last = count - 1;
  for (size_t i = 0; i <= last; ++i) look_up(i, last);
  while (last > 0) {
    size_t best = 0;
    for (size_t i = 1; i < last; ++i) best = ranks[i] < ranks[best] ? i : best;
    if (ranks[best] == kNoRank) break;
    symbols[best].id = merged[best];
    symbols[best].length += symbols[best + 1].length;
    for (size_t i = best + 1; i < last; ++i) {
      symbols[i] = symbols[i + 1];
      ranks[i] = ranks[i + 1];
      merged[i] = merged[i + 1];
    }
    --last;
    look_up(best, last);
    if (best > 0) look_up(best - 1, last);
  }
  symbols.resize(last + 1);
}

// The same result in n log n: a heap of candidate merges, ordered by rank and then place, over a
// linked list. Entries whose pair has changed since are skipped when they come up.
void Bpe::merge_long(Scratch& scratch) const {
  auto& symbols = scratch.symbols;
  auto& previous = scratch.previous;
  auto& next = scratch.next;
  auto& heap = scratch.heap;
  const size_t count = symbols.size();
  PITH_CHECK(count < kNone, "a piece of {} symbols is too long", count);
  previous.resize(count);
  next.resize(count);
  heap.clear();
  auto pair_at = [&](uint32_t i) -> const Slot& {
    static const Slot none;
    return next[i] == kNone ? none : find(symbols[i].id, symbols[next[i]].id);
  };
  auto push = [&](uint32_t i) {
    const uint32_t rank = pair_at(i).rank;
    if (rank == kNoRank) return;
    heap.push_back(static_cast<uint64_t>(rank) << 32 | i);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  for (uint32_t i = 0; i < count; ++i) {
    previous[i] = i == 0 ? kNone : i - 1;
    next[i] = i + 1 == count ? kNone : i + 1;
    push(i);
  }
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const auto i = static_cast<uint32_t>(top);
    if (symbols[i].length == 0) continue;  // swallowed by its left neighbour
    const Slot& slot = pair_at(i);
    if (slot.rank != static_cast<uint32_t>(top >> 32)) continue;
    const uint32_t right = next[i];
    symbols[i].id = slot.merged;
    symbols[i].length += symbols[right].length;
    symbols[right].length = 0;
    next[i] = next[right];
    if (next[i] != kNone) previous[next[i]] = i;
    if (previous[i] != kNone) push(previous[i]);
    push(i);
  }
  std::erase_if(symbols, [](const Scratch::Symbol& symbol) { return symbol.length == 0; });
}

void Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids,
    std::vector<uint32_t>* lengths) const {
  if (piece.empty()) return;
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
    symbols.assign(1, {whole, static_cast<uint32_t>(piece.size())});
  } else {
    split_into_symbols(piece, scratch);
    if (symbols.size() > kShort) {
      merge_long(scratch);
    } else if (symbols.size() > 1) {
      merge_short(scratch);
    }
  }
  for (const Scratch::Symbol& symbol : symbols) {
    ids.push_back(symbol.id);
    if (lengths) lengths->push_back(symbol.length);
  }
  if (entry && symbols.size() <= Scratch::kCachedTokens && scratch.dropped == dropped_before) {
    std::memcpy(entry->key, piece.data(), piece.size());
    entry->key_size = static_cast<uint8_t>(piece.size());
    entry->count = static_cast<uint8_t>(symbols.size());
    for (size_t i = 0; i < symbols.size(); ++i) {
      entry->ids[i] = symbols[i].id;
      entry->lengths[i] = static_cast<uint8_t>(symbols[i].length);
    }
  }
}

}  // namespace pith
