#include "text/tokenizer.h"
#include "text/tokenizer_state.h"

namespace pith {
namespace {
using Pair = uint64_t; // pair_key
struct PairHash {
  size_t operator()(Pair pair) const { return pair * 0x9E3779B97F4A7C15ull >> 16; }
};
using WordLists = unordered_map<Pair, vector<uint32_t>, PairHash>;

// A pair and the words that held it when it was queued. Counts are checked again when it comes up.
struct Candidate {
  int64_t count;
  Pair pair;
  vector<uint32_t> words;
  bool operator<(const Candidate& other) const { // it comes up later
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

struct Word { // a different piece of the corpus and how often it stands there
  vector<int32_t> symbols;
  int64_t count;
};

// Calls change(pair, +1 or -1) for every neighbourhood that the merge makes or breaks.
template <class Change>
void merge(vector<int32_t>& s, int32_t left, int32_t right, int32_t merged, Change change) {
  size_t out = 0;
  for (size_t in = 0; in < s.size();) {
    if (in + 1 == s.size() || s[in] != left || s[in + 1] != right) {
      s[out++] = s[in++];
      continue;
    }
    if (out > 0) {
      change(pair_key(s[out - 1], left), -1);
      change(pair_key(s[out - 1], merged), +1);
    }
    s[out++] = merged;
    in += 2;
    if (in < s.size()) {
      change(pair_key(right, s[in]), -1);
      change(pair_key(merged, s[in]), +1);
    }
  }
  s.resize(out);
}

void note(WordLists& lists, Pair pair, size_t word) {
  auto& list = lists[pair];
  if (list.empty() || list.back() != word) list.push_back(uint32_t(word));
}
}

BpeTrainer::BpeTrainer(BpeTrainerOptions options) : options_(std::move(options)) {
  const auto needed = 256 + ssize(options_.special_tokens);
  PITH_CHECK(options_.vocab_size >= needed,
    "a vocabulary of {} is smaller than the {} of bytes and special tokens", options_.vocab_size,
    needed);
  counts_.resize(index(options_.threads));
}

void BpeTrainer::add(span<const string> texts) {
  const Split pieces{Regex(options_.pattern), SplitBehavior::kIsolated};
  on_threads(options_.threads, texts.size(), [&](int thread, size_t i) {
    Counts& counts = counts_[index(thread)];
    string text;
    utf8_replace_invalid(texts[i], text);
    split_text(
      pieces, text, [&](size_t begin, size_t end) { ++counts[text.substr(begin, end - begin)]; });
  });
}

Tokenizer BpeTrainer::train() const {
  // Ids: special tokens, then the bytes in the order of their stand-ins, then merges.
  vector<string> vocabulary;
  unordered_map<string, int32_t> ids;
  auto id_of = [&](const string& token) {
    const auto [found, is_new] = ids.emplace(token, int32_t(ids.size()));
    if (is_new) vocabulary.push_back(token);
    return found->second;
  };
  vector<pair<string, int32_t>> special;
  for (const string& token: options_.special_tokens) {
    PITH_CHECK(
      !token.empty() && !ids.contains(token), "special token \"{}\" is empty or twice", token);
    special.emplace_back(token, id_of(token));
  }
  map<string, int> alphabet;
  for (int byte = 0; byte < 256; ++byte) alphabet[spell_bytes(string(1, char(byte)))] = byte;
  int32_t byte_ids[256];
  for (const auto& [token, byte]: alphabet) byte_ids[byte] = id_of(token);

  Counts total;
  for (const Counts& counts: counts_)
    for (const auto& [piece, count]: counts) total[piece] += count;
  vector<Word> words;
  unordered_map<Pair, int64_t, PairHash> pair_counts;
  WordLists lists;
  for (const auto& [piece, count]: total) {
    vector<int32_t> symbols;
    for (const char byte: piece) symbols.push_back(byte_ids[uint8_t(byte)]);
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const Pair pair = pair_key(symbols[i], symbols[i + 1]);
      pair_counts[pair] += count;
      note(lists, pair, words.size());
    }
    words.push_back({std::move(symbols), count});
  }
  total.clear();

  std::priority_queue<Candidate> queue;
  auto queue_all = [&] {
    for (auto& [pair, list]: lists) {
      const int64_t count = pair_counts[pair];
      if (count > 0) queue.push({count, pair, std::move(list)});
    }
    lists.clear();
  };
  queue_all();

  vector<pair<int32_t, int32_t>> merges;
  unordered_map<Pair, size_t, PairHash> places; // of each pair in merges
  while (ssize(vocabulary) < options_.vocab_size && !queue.empty()) {
    Candidate top = std::move(const_cast<Candidate&>(queue.top())); // popped at once: order holds
    queue.pop();
    const int64_t count = pair_counts[top.pair];
    if (count != top.count) { // it changed since; counts only fall
      top.count = count;
      queue.push(std::move(top));
      continue;
    }
    if (count < 1 || count < options_.min_frequency) break;
    const auto left = int32_t(top.pair >> 32), right = int32_t(top.pair);
    // Two pairs can spell one token: it keeps its id, and the vocabulary does not grow.
    const int32_t merged = id_of(vocabulary[index(left)] + vocabulary[index(right)]);
    const auto [place, is_new] = places.emplace(top.pair, merges.size());
    if (!is_new) merges[exchange(place->second, merges.size())] = {-1, -1}; // the later counts
    merges.emplace_back(left, right);
    for (const uint32_t word: top.words) {
      merge(words[word].symbols, left, right, merged, [&](Pair pair, int change) {
        pair_counts[pair] += change * words[word].count;
        if (change > 0) note(lists, pair, word);
      });
    }
    queue_all();
  }
  std::erase(merges, pair<int32_t, int32_t>{-1, -1});
  return Tokenizer::from_json(byte_level_json(vocabulary, merges, options_.pattern, special),
    options_.special_tokens.empty() ? "" : tokenizer_config_json(options_.special_tokens[0]));
}
}
