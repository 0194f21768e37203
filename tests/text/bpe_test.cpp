// The model alone: merging, long pieces, training.
#include "text/bpe.h"
#include <gtest/gtest.h>
#include <algorithm>
#include <chrono>
#include <random>
#include "core/error.h"
#include "text/tokenizer.h"
#include "text/tokenizer_state.h"

namespace pith {
namespace {
// Merges the leftmost pair of lowest rank, over and over: what every faster way has to equal.
std::vector<int32_t> merge_naively(std::vector<int32_t> ids, const std::vector<BpeMerge>& merges) {
  while (true) {
    const BpeMerge* best = nullptr;
    size_t place = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      for (const BpeMerge& merge: merges) {
        const bool fits = merge.left == ids[i] && merge.right == ids[i + 1];
        if (fits && (!best || merge.rank < best->rank)) best = &merge, place = i;
      }
    }
    if (!best) return ids;
    ids[place] = best->merged;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
}

struct Model {
  std::vector<std::string> tokens;
  std::vector<BpeMerge> merges;
  Bpe bpe;
};

Model powers_of_a() {
  Model model{{"a", "aa", "aaaa", "aaaaaaaa"}, {{0, 0, 1, 0}, {1, 1, 2, 1}, {2, 2, 3, 2}}, {}};
  model.bpe = Bpe(model.tokens, model.merges, {});
  return model;
}

TEST(Bpe, EqualsTheNaiveWayForShortAndLongPieces) {
  std::mt19937 random(3);
  Model model{{"a", "b", "c"}, {}, {}};
  while (model.merges.size() < 40) {
    const auto count = static_cast<int32_t>(model.tokens.size());
    std::uniform_int_distribution<int32_t> any(0, count - 1);
    const int32_t left = any(random), right = any(random);
    const std::string token =
      model.tokens[static_cast<size_t>(left)] + model.tokens[static_cast<size_t>(right)];
    if (std::find(model.tokens.begin(), model.tokens.end(), token) != model.tokens.end()) continue;
    model.merges.push_back({left, right, count, static_cast<uint32_t>(model.merges.size())});
    model.tokens.push_back(token);
  }
  model.bpe = Bpe(model.tokens, model.merges, {});
  Bpe::Scratch scratch;
  for (int round = 0; round < 300; ++round) {
    std::string piece(1 + random() % 200, 'a');
    for (char& c: piece) c = static_cast<char>('a' + random() % 3);
    std::vector<int32_t> symbols, ids;
    for (char c: piece) symbols.push_back(c - 'a');
    for (int twice = 0; twice < 2; ++twice) { // the second time short ones come from the cache
      ids.clear();
      std::vector<uint32_t> lengths;
      model.bpe.encode(piece, scratch, ids, &lengths);
      ASSERT_EQ(ids, merge_naively(symbols, model.merges)) << piece;
      for (size_t i = 0; i < ids.size(); ++i)
        ASSERT_EQ(lengths[i], model.tokens[static_cast<size_t>(ids[i])].size());
    }
  }
}

TEST(Bpe, MillionLettersTakeLinearTime) {
  const Model model = powers_of_a();
  Bpe::Scratch scratch;
  const std::string piece(1'000'000, 'a');
  std::vector<int32_t> ids;
  const auto start = std::chrono::steady_clock::now();
  model.bpe.encode(piece, scratch, ids, nullptr);
  EXPECT_EQ(ids, std::vector<int32_t>(125'000, 3));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

std::vector<std::string> learned(std::vector<std::string> texts, int64_t size, int threads) {
  BpeTrainer trainer({.vocab_size = size, .threads = threads});
  trainer.add(texts);
  const Tokenizer tokenizer = trainer.train();
  std::vector<std::string> tokens;
  for (int32_t id = 257; id < tokenizer.vocab_size(); ++id) tokens.push_back(tokenizer.token(id));
  return tokens;
}

TEST(BpeTrainer, BreaksTiesByIds) {
  const std::vector<std::string> six_tied = {"AB", "BAB", "CD", "BABCD"};
  const auto first = learned({"DCBBABCDCBABCD"}, 261, 1);
  EXPECT_EQ(first, six_tied);
  const std::vector<std::string> words = {"low", "low", "low", "low", "low", "lower", "lower",
    "newest", "newest", "newest", "newest", "newest", "newest", "widest", "widest", "widest"};
  const auto merged = learned(words, 263, 1);
  EXPECT_EQ(merged, (std::vector<std::string>{"es", "est", "lo", "low", "ew", "new"}));
}

TEST(BpeTrainer, DoesNotDependOnThreadsOrOrder) {
  std::mt19937 random(5);
  std::vector<std::string> texts;
  for (int i = 0; i < 300; ++i) {
    std::string text;
    for (int k = 0; k < 40; ++k) text += static_cast<char>("abcde "[random() % 6]);
    texts.push_back(text);
  }
  const auto one = learned(texts, 600, 1);
  EXPECT_FALSE(one.empty());
  for (int threads: {2, 7}) {
    std::shuffle(texts.begin(), texts.end(), random);
    EXPECT_EQ(learned(texts, 600, threads), one);
  }
}

TEST(Regex, MatchesAsOnigurumaOrRefuses) {
  using Texts = std::vector<std::string>;
  auto matches = [](std::string_view pattern, std::string_view text) {
    Texts found;
    Regex(pattern).for_each_match(text, [&](size_t begin, size_t end) {
      if (begin < end) found.emplace_back(text.substr(begin, end - begin));
    });
    return found;
  };
  EXPECT_EQ(matches("\\d{1,2}+x", "12345x"), Texts{"12345x"}); // repeated, not possessive
  EXPECT_EQ(matches("(ab){2}+", "abababab"), Texts{"abababab"});
  EXPECT_EQ(matches("(ab){,3}", "ababababx"), (Texts{"ababab", "ab"}));
  EXPECT_EQ(matches("a{,", "aa{,"), Texts{"a{,"});
  EXPECT_EQ(matches("^a$", "b\na\nab"), Texts{"a"}); // at every line
  EXPECT_EQ(matches("(?i)k|[]\\x{E9}\\u0041-C\\]]+", "K]\u00e9aBC"), (Texts{"K", "]\u00e9aBC"}));
  EXPECT_EQ(matches("\\w+\\b|\\h", "a\u0300\u00b2 \u20ac"), (Texts{"a\u0300\u00b2"}));
  EXPECT_EQ(matches("\\p{^L}+", "a12b"), Texts{"12"});
  for (const char* pattern: {"\\p{Han}", "[a&&b]", "[[:alpha:]]", "(?<n>a)", "a(?i)b", "\\R", "\\1",
         "a{2}?", "\\pL", "a)", "[b-a]", "[a", "\\x{FFFFFFFFF}", "\\uD800", "\\x4", "a\\"})
    EXPECT_THROW(Regex{pattern}, Error) << pattern;
}

TEST(Regex, LiteralMatchesItsTextAlone) {
  std::vector<size_t> places;
  Regex::literal("a.").for_each_match("a.ab a.a.", [&](size_t begin, size_t end) {
    EXPECT_EQ(end, begin + 2);
    places.push_back(begin);
  });
  EXPECT_EQ(places, (std::vector<size_t>{0, 5, 7}));
}

} // namespace
} // namespace pith
