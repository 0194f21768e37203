#include "text/bpe_trainer.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <queue>

#include "core/error.h"
#include "text/tokenizer_stages.h"
#include "text/tokenizer_state.h"
#include "text/unicode.h"

namespace pith {
namespace {

struct Pair {
  int32_t left, right;
  auto operator<=>(const Pair&) const = default;
};
struct PairHash {
  size_t operator()(Pair pair) const {
    const auto left = static_cast<uint64_t>(static_cast<uint32_t>(pair.left));
    const uint64_t key = left << 32 | static_cast<uint32_t>(pair.right);
    return key * 0x9E3779B97F4A7C15ull >> 16;
  }
};

// A pair and the words that held it when it was queued. Counts are checked again when it comes up.
struct Candidate {
  int64_t count;
  Pair pair;
  std::vector<uint32_t> words;
};
struct ComesLater {
  bool operator()(const Candidate& a, const Candidate& b) const {
    if (a.count != b.count) return a.count < b.count;
    return a.pair > b.pair;
  }
};

// All different pieces of the corpus as symbols in one pool; merging shortens a word in place.
class Words {
 public:
  void add(std::string_view piece, int64_t count, const int32_t (&byte_ids)[256]) {
    begins_.push_back(pool_.size());
    sizes_.push_back(static_cast<uint32_t>(piece.size()));
    counts_.push_back(count);
    for (char byte : piece) pool_.push_back(byte_ids[static_cast<uint8_t>(byte)]);
  }
  size_t size() const { return sizes_.size(); }
  int64_t count(size_t word) const { return counts_[word]; }
  std::span<int32_t> symbols(size_t word) { return {&pool_[begins_[word]], sizes_[word]}; }

  // Calls change(pair, +1 or -1) for every neighbourhood that the merge makes or breaks.
  template <class Change>
  void merge(size_t word, Pair pair, int32_t merged, Change change) {
    const std::span<int32_t> s = symbols(word);
    size_t out = 0;
    for (size_t in = 0; in < s.size();) {
      if (in + 1 == s.size() || s[in] != pair.left || s[in + 1] != pair.right) {
        s[out++] = s[in++];
        continue;
      }
      if (out > 0) {
        change(Pair{s[out - 1], pair.left}, -1);
        change(Pair{s[out - 1], merged}, +1);
      }
      s[out++] = merged;
      in += 2;
      if (in < s.size()) {
        change(Pair{pair.right, s[in]}, -1);
        change(Pair{merged, s[in]}, +1);
      }
    }
    sizes_[word] = static_cast<uint32_t>(out);
  }

 private:
  std::vector<int32_t> pool_;
  std::vector<size_t> begins_;
  std::vector<uint32_t> sizes_;
  std::vector<int64_t> counts_;
};

using WordLists = std::unordered_map<Pair, std::vector<uint32_t>, PairHash>;

void note(WordLists& lists, Pair pair, size_t word) {
  auto& list = lists[pair];
  if (list.empty() || list.back() != word) list.push_back(static_cast<uint32_t>(word));
}

}  // namespace

BpeTrainer::BpeTrainer(BpeTrainerOptions options) : options_(std::move(options)) {
  PITH_CHECK(options_.threads > 0, "a trainer needs at least one thread");
  const auto needed = 256 + static_cast<int64_t>(options_.special_tokens.size());
  PITH_CHECK(options_.vocab_size >= needed,
      "a vocabulary of {} is smaller than the {} of bytes and special tokens", options_.vocab_size,
      needed);
  counts_.resize(static_cast<size_t>(options_.threads));
}

void BpeTrainer::add(std::span<const std::string> texts) {
  const Regex pattern(options_.pattern);
  std::atomic<size_t> next = 0;
  auto work = [&](Counts& counts) {
    RegexScratch scratch;
    std::string repaired;
    for (size_t i = next++; i < texts.size(); i = next++) {
      utf8_replace_invalid(texts[i], repaired);
      Splitter splitter(SplitBehavior::kIsolated, false, [&](size_t begin, size_t end) {
        if (begin < end) ++counts[repaired.substr(begin, end - begin)];
      });
      for_each_match_in(repaired, pattern, scratch,
          [&](size_t begin, size_t end) { splitter.match(begin, end); });
      splitter.finish(repaired.size());
    }
  };
  std::vector<std::future<void>> helpers;
  for (size_t i = 1; i < counts_.size(); ++i)
    helpers.push_back(std::async(std::launch::async, work, std::ref(counts_[i])));
  work(counts_[0]);
  for (std::future<void>& helper : helpers) helper.get();
}

Tokenizer BpeTrainer::train() const {
  // Ids: special tokens, then the bytes in the order of their stand-ins, then merges.
  std::vector<std::string> vocabulary = options_.special_tokens;
  std::unordered_map<std::string, int32_t> ids;
  auto id_of = [&](const std::string& token) {
    const auto [found, is_new] = ids.emplace(token, static_cast<int32_t>(ids.size()));
    if (is_new && found->second == static_cast<int32_t>(vocabulary.size()))
      vocabulary.push_back(token);
    return found->second;
  };
  for (const std::string& token : options_.special_tokens) {
    PITH_CHECK(!token.empty() && ids.emplace(token, static_cast<int32_t>(ids.size())).second,
        "special token \"{}\" is empty or given twice", token);
  }
  int32_t byte_ids[256];
  std::vector<std::pair<char32_t, int>> alphabet;
  for (int byte = 0; byte < 256; ++byte)
    alphabet.emplace_back(byte_to_char(static_cast<uint8_t>(byte)), byte);
  std::sort(alphabet.begin(), alphabet.end());
  for (const auto& [code, byte] : alphabet) {
    std::string token;
    utf8_append(code, token);
    byte_ids[byte] = id_of(token);
  }

  Counts total = counts_[0];
  for (size_t i = 1; i < counts_.size(); ++i)
    for (const auto& [piece, count] : counts_[i]) total[piece] += count;
  Words words;
  for (const auto& [piece, count] : total) words.add(piece, count, byte_ids);
  total.clear();

  std::unordered_map<Pair, int64_t, PairHash> pair_counts;
  WordLists lists;
  for (size_t word = 0; word < words.size(); ++word) {
    const auto symbols = words.symbols(word);
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const Pair pair{symbols[i], symbols[i + 1]};
      pair_counts[pair] += words.count(word);
      note(lists, pair, word);
    }
  }
  std::priority_queue<Candidate, std::vector<Candidate>, ComesLater> queue;
  auto queue_all = [&] {
    for (auto& [pair, list] : lists) {
      const int64_t count = pair_counts[pair];
      if (count > 0) queue.push({count, pair, std::move(list)});
    }
    lists.clear();
  };
  queue_all();

  std::vector<std::pair<int32_t, int32_t>> merges;
  std::unordered_map<Pair, size_t, PairHash> places;  // of each pair in merges
  while (static_cast<int64_t>(vocabulary.size()) < options_.vocab_size && !queue.empty()) {
    Candidate top = std::move(const_cast<Candidate&>(queue.top()));  // popped at once: order holds
    queue.pop();
    const int64_t count = pair_counts[top.pair];
    if (count != top.count) {  // it changed since; counts only fall
      top.count = count;
      queue.push(std::move(top));
      continue;
    }
    if (count < 1 || count < options_.min_frequency) break;
    const auto left = static_cast<size_t>(top.pair.left),
               right = static_cast<size_t>(top.pair.right);
    // Two pairs can spell one token: it keeps its id, and the vocabulary does not grow.
    const int32_t merged = id_of(vocabulary[left] + vocabulary[right]);
    merges.emplace_back(top.pair.left, top.pair.right);
    if (const auto [place, is_new] = places.emplace(top.pair, merges.size() - 1); !is_new) {
      merges[place->second] = {-1, -1};  // queued twice: the later place counts
      place->second = merges.size() - 1;
    }
    for (const uint32_t word : top.words) {
      words.merge(word, top.pair, merged, [&](Pair pair, int change) {
        pair_counts[pair] += change * words.count(word);
        if (change > 0) note(lists, pair, word);
      });
    }
    queue_all();
  }
  std::erase(merges, std::pair<int32_t, int32_t>{-1, -1});

  std::vector<std::pair<std::string, int32_t>> special;
  for (const std::string& token : options_.special_tokens) special.emplace_back(token, ids[token]);
  return Tokenizer::from_json(byte_level_json(vocabulary, merges, options_.pattern, false, special),
      options_.special_tokens.empty() ? "" : tokenizer_config_json(options_.special_tokens[0]));
}

}  // namespace pith
