#include "engine/batches.h"
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include "tests/engine/scratch.h"

namespace pith {
namespace {
// Document d has ids 1000 d, 1000 d + 1, ...: every token says where it comes from.
Corpus corpus_of(const Scratch& scratch, const std::vector<int>& lengths,
  const std::string& name = "c", const std::string& tokenizer = "") {
  CorpusWriter writer(scratch / name, 201088, tokenizer);
  for (size_t d = 0; d < lengths.size(); ++d) {
    std::vector<int32_t> ids(static_cast<size_t>(lengths[d]));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(1000 * d + i);
    writer.add_document(ids);
  }
  writer.finish();
  return Corpus((scratch / name).string());
}

std::vector<int> random_lengths(uint32_t seed, size_t count) {
  std::mt19937 random(seed);
  std::vector<int> lengths(count);
  for (int& length: lengths)
    length = random() % 4 == 0 ? static_cast<int>(random() % 4) : static_cast<int>(random() % 90);
  lengths[0] = 0;
  return lengths;
}

// The whole stream as far as it goes, rebuilt from rows.
std::vector<int64_t> stream_of(const RowStream& stream, int64_t rows) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < rows; ++i) {
    const Row row = stream.row(i);
    tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
  }
  return tokens;
}

TEST(RowStream, EveryTokenIsAnInputExactlyOnceAnEpoch) {
  for (const bool shuffle: {false, true}) {
    for (const int64_t length: {1, 7, 32, 64, 5000}) {
      const Scratch scratch;
      const Corpus corpus = corpus_of(scratch, random_lengths(5, 40));
      const RowStream stream(corpus, length, 3, true, shuffle);
      const auto epoch = static_cast<size_t>(corpus.num_tokens());
      EXPECT_EQ(stream.rows_per_epoch(), corpus.num_tokens() / length);
      const auto tokens = stream_of(stream, static_cast<int64_t>(3 * epoch) / length + 1);
      std::vector<std::vector<int64_t>> orders;
      for (size_t e = 0; e < 3; ++e) {
        const auto begin = tokens.begin() + static_cast<int64_t>(e * epoch);
        orders.emplace_back(begin, begin + corpus.num_tokens());
        EXPECT_EQ(std::set<int64_t>(orders[e].begin(), orders[e].end()).size(), epoch);
        // Documents stay whole, but for the borders of rows, since those change places: ids count
        // up.
        for (size_t i = 1; i < epoch; ++i) {
          const bool row_border = shuffle && (e * epoch + i) % static_cast<size_t>(length) == 0;
          EXPECT_TRUE(
            row_border || orders[e][i] % 1000 == 0 || orders[e][i] == orders[e][i - 1] + 1);
        }
      }
      EXPECT_EQ(orders[0] == orders[1], !shuffle);
      EXPECT_EQ(std::is_sorted(orders[0].begin(), orders[0].end()), !shuffle);
    }
  }
}

TEST(RowStream, LabelsAndPositionsStopAtDocuments) {
  const Scratch scratch;
  const Corpus corpus = corpus_of(scratch, random_lengths(6, 30));
  for (const int64_t length: {1, 5, 33, 4000}) {
    const RowStream stream(corpus, length, 1, true, true);
    int64_t trained = 0;
    const int64_t rows = 2 * corpus.num_tokens() / length + 2;
    for (int64_t i = 0; i < rows; ++i) {
      const Row row = stream.row(i);
      ASSERT_EQ(static_cast<int64_t>(row.tokens.size()), length);
      ASSERT_EQ(row.document_begins.at(0), 0);
      size_t document = 0;
      for (size_t t = 0; t < row.tokens.size(); ++t) {
        if (document + 1 < row.document_begins.size() &&
          row.document_begins[document + 1] == static_cast<int64_t>(t))
          ++document;
        const int64_t begin = row.document_begins[document];
        EXPECT_EQ(row.positions[t], static_cast<int64_t>(t) - begin);
        EXPECT_TRUE(t == 0 || (row.tokens[t] % 1000 == 0) == (begin == static_cast<int64_t>(t)));
        const bool last = row.tokens[t] % 1000 == corpus.length(row.tokens[t] / 1000) - 1;
        EXPECT_EQ(row.labels[t], last ? -100 : row.tokens[t] + 1);
        trained += last ? 0 : 1;
      }
      EXPECT_EQ(document + 1, row.document_begins.size());
      EXPECT_EQ(stream.trained_tokens(i), row.trained_tokens());
    }
    EXPECT_GT(trained, 0);
  }
}

// With best_fit rows: documents whole unless longer than a row, labels inside documents, padding
// last and untrained, every token once an epoch, rows as full as best-fit decreasing makes them.
TEST(RowStream, BestFitPacksEveryTokenOnceAnEpoch) {
  for (const bool shuffle: {false, true}) {
    for (const int64_t length: {1, 2, 7, 32, 64, 100, 5000}) {
      const Scratch scratch;
      const Corpus corpus = corpus_of(scratch, random_lengths(8, 60)); // document 0 is empty
      const RowStream stream(corpus, length, 3, true, shuffle, Packing::best_fit);
      const int64_t rows = stream.rows_per_epoch();
      std::vector<std::vector<int64_t>> orders(3);
      for (int64_t index = 0; index < 3 * rows; ++index) {
        auto& order = orders[static_cast<size_t>(index / rows)];
        const Row row = stream.row(index);
        ASSERT_EQ(static_cast<int64_t>(row.tokens.size()), length);
        ASSERT_EQ(static_cast<int64_t>(row.positions.size()), length);
        EXPECT_EQ(stream.trained_tokens(index), row.trained_tokens());
        for (size_t d = 0; d < row.document_begins.size(); ++d) {
          const auto begin = static_cast<size_t>(row.document_begins[d]);
          const bool last = d + 1 == row.document_begins.size();
          const size_t end =
            last ? row.tokens.size() : static_cast<size_t>(row.document_begins[d + 1]);
          ASSERT_LT(begin, end);
          for (size_t t = begin; t < end; ++t)
            EXPECT_EQ(row.positions[t], static_cast<int64_t>(t - begin));
          if (row.tokens[begin] == 0) { // no document has this id: padding
            EXPECT_TRUE(last && begin > 0);
            for (size_t t = begin; t < end; ++t)
              EXPECT_TRUE(row.tokens[t] == 0 && row.labels[t] == -100);
            continue;
          }
          const int64_t document = row.tokens[begin] / 1000, first = row.tokens[begin] % 1000;
          const int64_t size = corpus.length(document);
          EXPECT_EQ(first % length, 0);
          EXPECT_EQ(static_cast<int64_t>(end - begin), std::min(length, size - first));
          for (size_t t = begin; t < end; ++t) {
            EXPECT_EQ(row.tokens[t], row.tokens[begin] + static_cast<int64_t>(t - begin));
            EXPECT_EQ(row.labels[t], row.tokens[t] % 1000 == size - 1 ? -100 : row.tokens[t] + 1);
            order.push_back(row.tokens[t]);
          }
        }
      }
      std::vector<int64_t> emptiest = {length, length}; // tokens in the two emptiest rows
      for (int64_t index = 0; index < rows; ++index) {
        const Row row = stream.row(index);
        emptiest.push_back(length - std::count(row.tokens.begin(), row.tokens.end(), 0));
      }
      std::sort(emptiest.begin(), emptiest.end());
      EXPECT_GT(emptiest[0] + emptiest[1], length); // else one row would hold both
      for (auto& order: orders) {
        EXPECT_EQ(static_cast<int64_t>(order.size()), corpus.num_tokens());
        EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), order.size());
      }
      EXPECT_EQ(orders[0] == orders[1], !shuffle);
    }
  }
}

TEST(RowStream, BestFitDecreasingByHand) {
  const Scratch scratch;
  const Corpus corpus = corpus_of(scratch, {0, 3, 25, 4, 6, 7}); // 25 = two rows and 5 tokens
  const RowStream stream(corpus, 10, 1, true, false, Packing::best_fit);
  std::vector<std::vector<int64_t>> begins;
  for (int64_t i = 0; i < stream.rows_per_epoch(); ++i) {
    const Row row = stream.row(i);
    begins.emplace_back();
    for (const int64_t begin: row.document_begins)
      begins.back().push_back(row.tokens[static_cast<size_t>(begin)]);
  }
  // Ends in their order 7, 6, 5, 4, 3: 4 goes beside 6, 3 beside 7; 5 leaves half a row.
  EXPECT_EQ(begins,
    (std::vector<std::vector<int64_t>>{{2000}, {2010}, {5000, 1000}, {4000, 3000}, {2020, 0}}));
  EXPECT_EQ(stream.row(0).labels.back(), 2010); // of a document that goes on in another row
  // Padding is marked for the balance loss, which leaves it out.
  const Tensor row_id = make_batch(stream, 3, 2, 2, 0, 1, true, at::kCPU).at(0).row_id;
  std::vector<int32_t> marks(20, 0);
  std::fill_n(marks.begin() + 10, 10, 1);
  std::fill_n(marks.begin() + 15, 5, ~1);
  EXPECT_EQ(
    std::vector<int32_t>(row_id.data_ptr<int32_t>(), row_id.data_ptr<int32_t>() + 20), marks);
}

TEST(RowStream, PlacesBeyond32Bits) {
  // Only the index is real: 3 documents of 2^31 - 1 tokens, told apart by 3 of them.
  const Scratch scratch;
  const int64_t size = (int64_t{1} << 31) - 1, tokens = 3 * size;
  std::string index("MMIDIDX\0\0", 9);
  const auto put = [&](auto value) { index.append(reinterpret_cast<char*>(&value), sizeof value); };
  put(uint64_t{1}), put(uint8_t{8}), put(uint64_t{3}), put(uint64_t{4});
  for (int d = 0; d < 3; ++d) put(static_cast<int32_t>(size));
  for (int64_t d = 0; d < 3; ++d) put(d * size * 2);
  for (int64_t d = 0; d < 4; ++d) put(d);
  put_bytes(scratch / "big.idx", index);
  put_bytes(scratch / "big.bin", "");
  std::filesystem::resize_file(scratch / "big.bin", static_cast<uint64_t>(tokens) * 2);
  std::fstream bin(scratch / "big.bin", std::ios::binary | std::ios::in | std::ios::out);
  bin.seekp((tokens - 1) * 2).write("\x07\0", 2);
  bin.close();
  const Corpus corpus((scratch / "big").string());
  ASSERT_EQ(corpus.num_tokens(), tokens);
  const int64_t length = 4096;
  const RowStream concat(corpus, length, 1, true, false);
  const int64_t last = tokens / length; // the row with the epoch's end in it
  EXPECT_EQ(concat.rows_per_epoch(), last);
  const Row row = concat.row(last);
  const auto end = static_cast<size_t>(tokens - last * length - 1);
  EXPECT_EQ(row.tokens[end], 7);
  EXPECT_EQ(row.labels[end], -100);
  EXPECT_EQ(row.document_begins, (std::vector<int64_t>{0, static_cast<int64_t>(end) + 1}));
  EXPECT_EQ(concat.row(8 * last).tokens.size(), 4096u);
  const RowStream packed(corpus, length, 1, true, false, Packing::best_fit);
  EXPECT_EQ(packed.rows_per_epoch(), 3 * (size / length + 1)); // each end fills most of a row
  EXPECT_EQ(packed.row(3 * (size / length) + 2).tokens[size % length - 1], 7);
}

TEST(RowStream, WithoutMaskRowsAreOneDocumentAndLabelsCross) {
  const Scratch scratch;
  const Corpus corpus = corpus_of(scratch, {3, 5, 4});
  const RowStream stream(corpus, 5, 0, false, false);
  const Row first = stream.row(0), second = stream.row(1), third = stream.row(2);
  EXPECT_EQ(first.tokens, (std::vector<int64_t>{0, 1, 2, 1000, 1001}));
  EXPECT_EQ(first.labels, (std::vector<int64_t>{1, 2, 1000, 1001, 1002}));
  EXPECT_EQ(second.labels, (std::vector<int64_t>{1003, 1004, 2000, 2001, 2002}));
  EXPECT_EQ(third.tokens, (std::vector<int64_t>{2002, 2003, 0, 1, 2})); // into the next epoch
  EXPECT_EQ(third.labels, (std::vector<int64_t>{2003, 0, 1, 2, 1000}));
  for (const Row& row: {first, second, third}) {
    EXPECT_EQ(row.document_begins, std::vector<int64_t>{0});
    EXPECT_EQ(row.positions, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  }
}

TEST(RowStream, TheOrderIsFixedForever) {
  // A checkpoint's cursor means the same rows with every compiler and on every machine. Values of
  // this program, written down: a change of them breaks resuming.
  const Scratch scratch;
  const RowStream stream(corpus_of(scratch, {1, 1, 1, 1, 1, 1, 1, 1}), 8, 42, true, true);
  const auto order = [&](int64_t epoch) {
    std::vector<int64_t> tokens = stream.row(epoch).tokens;
    for (int64_t& token: tokens) token /= 1000;
    return tokens;
  };
  EXPECT_EQ(order(0), (std::vector<int64_t>{2, 5, 4, 0, 3, 1, 7, 6}));
  EXPECT_EQ(order(1), (std::vector<int64_t>{1, 4, 6, 5, 3, 7, 0, 2}));
  const RowStream packed(
    corpus_of(scratch, {0, 3, 4, 5, 4, 3, 5, 12}), 8, 42, true, true, Packing::best_fit);
  std::vector<int64_t> firsts;
  for (int64_t row = 0; row < 2 * packed.rows_per_epoch(); ++row)
    firsts.push_back(packed.row(row).tokens[0]);
  EXPECT_EQ(firsts,
    (std::vector<int64_t>{4000, 6000, 7000, 7008, 3000, //
      4000, 7000, 6000, 2000, 3000}));
  const Blend blend({packed, packed, packed}, {0.5, 0.3, 0.2});
  std::vector<size_t> sources;
  for (int64_t row = 0; row < 10; ++row) sources.push_back(blend.place(row).source);
  EXPECT_EQ(sources, (std::vector<size_t>{0, 1, 0, 2, 0, 1, 0, 1, 0, 2}));
}

TEST(RowStream, ShufflesUniformly) {
  // Each of the 6 orders of 3 documents about equally often: chi-square with 5 degrees below 20.5
  // (p = 0.001).
  const Scratch scratch;
  const Corpus corpus = corpus_of(scratch, {1, 1, 1});
  std::map<std::vector<int64_t>, int> counts;
  for (uint64_t seed = 0; seed < 1200; ++seed)
    ++counts[RowStream(corpus, 3, seed, true, true).row(0).tokens];
  ASSERT_EQ(counts.size(), 6u);
  double chi_square = 0;
  for (const auto& [order, count]: counts) chi_square += (count - 200.0) * (count - 200.0) / 200.0;
  EXPECT_LT(chi_square, 20.5);
}

TEST(RowStream, TinyCorporaAndBounds) {
  const Scratch scratch;
  const RowStream stream(corpus_of(scratch, {0, 2, 0}), 7, 1, true,
    true); // a row spans four epochs
  const Row row = stream.row(1);
  EXPECT_EQ(row.tokens, (std::vector<int64_t>{1001, 1000, 1001, 1000, 1001, 1000, 1001}));
  EXPECT_EQ(row.labels, (std::vector<int64_t>{-100, 1001, -100, 1001, -100, 1001, -100}));
  EXPECT_EQ(row.positions, (std::vector<int64_t>{0, 0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(row.document_begins, (std::vector<int64_t>{0, 1, 3, 5}));
  EXPECT_EQ(stream.rows_per_epoch(), 0);
  EXPECT_ERROR(RowStream(corpus_of(scratch, {0}), 7, 1, true, true), "is empty");
  // Exactly one row, and one token more.
  EXPECT_EQ(RowStream(corpus_of(scratch, {7}), 7, 1, true, true).row(0).labels.back(), -100);
  EXPECT_EQ(RowStream(corpus_of(scratch, {8}), 7, 1, true, true).row(0).labels.back(), 7);
}

TEST(RowStream, RandomAccessFromManyThreadsEqualsReadingInOrder) {
  const Scratch scratch;
  const Corpus corpus = corpus_of(scratch, random_lengths(9, 50));
  const RowStream in_order(corpus, 11, 4, true, true), shared(corpus, 11, 4, true, true);
  const int64_t rows = 4 * in_order.rows_per_epoch();
  std::vector<std::vector<int64_t>> expected;
  for (int64_t i = 0; i < rows; ++i) expected.push_back(in_order.row(i).tokens);
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (uint32_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        const int64_t row = random() % rows;
        wrong += shared.row(row).tokens != expected[static_cast<size_t>(row)];
      }
    });
  for (std::thread& thread: threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Blend, EveryShareHoldsOverEveryPrefix) {
  const Scratch scratch;
  const RowStream stream(corpus_of(scratch, {9, 20}), 4, 1, true, true);
  std::vector<std::vector<double>> cases = {{1}, {0.7, 0.3}, {1, 1, 1}, {0.5, 0.3, 0.15, 0.05},
    {1000, 1}, {1, 1, 1, 1, 1, 1, 1, 50}, {1.0 / 3, 1.0 / 7, 1.0 / 11}, {37511845, 1234567, 89}};
  std::mt19937 random(3);
  for (int i = 0; i < 40; ++i) {
    cases.emplace_back(2 + random() % 9);
    for (double& weight: cases.back()) weight = static_cast<double>(1 + random() % 60);
  }
  for (const auto& weights: cases) {
    const Blend blend(std::vector<RowStream>(weights.size(), stream), weights);
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<int64_t> counts(weights.size(), 0);
    for (int64_t i = 0; i < 20000; ++i) {
      const auto [source, row] = blend.place(i);
      ASSERT_EQ(row, counts[source]++);
      for (size_t s = 0; s < weights.size(); ++s)
        ASSERT_LT(std::abs(static_cast<double>(counts[s]) -
                    static_cast<double>(i + 1) * weights[s] / total),
          1 + static_cast<double>(i) * 0x1p-20)
          << "source " << s << " after " << i + 1 << " rows of " << fmt::format("{}", total);
    }
  }
  const Blend blend({stream, stream}, {0.7, 0.3});
  EXPECT_EQ(blend.weights(), (std::vector<int64_t>{7, 3}));
  EXPECT_EQ(Blend({stream, stream}, {0.1 + 0.2, 0.3}).weights(), (std::vector<int64_t>{1, 1}));
  const auto [source, row] = blend.place(std::numeric_limits<int64_t>::max());
  EXPECT_LT(std::abs(static_cast<double>(row) / 0x1p63 - (source == 0 ? 0.7 : 0.3)), 1e-9);
}

TEST(Blend, EndsWithTheFirstExhaustedSource) {
  const Scratch scratch;
  std::mt19937 random(4);
  for (int round = 0; round < 30; ++round) {
    std::vector<RowStream> streams;
    std::vector<double> weights;
    for (int s = 0; s < 3; ++s) {
      streams.emplace_back(
        corpus_of(scratch, {static_cast<int>(4 + random() % 300)}, fmt::format("{}", s)), 4, 1,
        true, true, round % 2 == 0 ? Packing::concat : Packing::best_fit);
      weights.push_back(static_cast<double>(1 + random() % 7));
    }
    const Blend blend(streams, weights);
    int64_t expected = 0;
    for (;; ++expected) {
      const auto [source, row] = blend.place(expected);
      if (row == streams[source].rows_per_epoch()) break;
    }
    EXPECT_EQ(blend.rows_before_repeat(), expected);
  }
  EXPECT_EQ(Blend(RowStream(corpus_of(scratch, {3}), 4, 1, true, true)).rows_before_repeat(), 0);
}

TEST(Blend, TokenizersMustAgree) {
  const Scratch scratch;
  const Corpus a = corpus_of(scratch, {3}, "a", "11"), b = corpus_of(scratch, {3}, "b", "22");
  check_same_tokenizer({a, a});
  EXPECT_ERROR(check_same_tokenizer({a, a, b}), "/a (vocabulary 201088, tokenizer 11)",
    "/b (vocabulary 201088, tokenizer 22)");
  CorpusWriter writer(scratch / "small", 7, "11");
  writer.add_document(std::vector<int32_t>{1});
  writer.finish();
  EXPECT_ERROR(check_same_tokenizer({a, Corpus(scratch / "small")}), "vocabulary 7");
  std::filesystem::remove(scratch / "b.json"); // of another program: does not say
  check_same_tokenizer({a, Corpus(scratch / "b"), a});
}

// A new process that knows the cursor alone makes the batches of one that ran straight.
TEST(Blend, ResumesAtEveryStep) {
  const Scratch scratch;
  const std::vector<Corpus> corpora = {corpus_of(scratch, random_lengths(21, 60), "a"),
    corpus_of(scratch, random_lengths(22, 30), "b"),
    corpus_of(scratch, random_lengths(23, 9), "c")};
  for (const Packing packing: {Packing::concat, Packing::best_fit}) {
    const auto open = [&] {
      std::vector<RowStream> streams;
      for (const Corpus& corpus: corpora) streams.emplace_back(corpus, 16, 5, true, true, packing);
      return Blend(streams, {0.6, 0.3, 0.1});
    };
    const Blend straight = open();
    EXPECT_LT(straight.rows_before_repeat(), 600); // several epochs
    for (int64_t step = 0; step < 200; ++step) {
      const auto expected = make_batch(straight, 6 * step, 6, 2, 0, 1, true, at::kCPU);
      const auto resumed = make_batch(open(), 6 * step, 6, 2, 0, 1, true, at::kCPU);
      for (size_t m = 0; m < expected.size(); ++m) {
        ASSERT_TRUE(at::equal(expected[m].tokens, resumed[m].tokens)) << "step " << step;
        ASSERT_TRUE(at::equal(expected[m].labels, resumed[m].labels));
        ASSERT_TRUE(at::equal(expected[m].positions, resumed[m].positions));
        ASSERT_TRUE(at::equal(expected[m].cu_seqlens, resumed[m].cu_seqlens));
        ASSERT_EQ(expected[m].global_trained_tokens, resumed[m].global_trained_tokens);
      }
    }
  }
}

// Known-faults 41: the ranks together read what one process reads, for any number of ranks.
TEST(MakeBatch, RanksTogetherReadTheGlobalBatch) {
  const Scratch scratch;
  const Blend rows({{corpus_of(scratch, random_lengths(31, 50), "a"), 16, 5, true, true},
                     {corpus_of(scratch, random_lengths(32, 50), "b"), 16, 5, true, true}},
    {2, 1});
  const auto one = make_batch(rows, 48, 24, 24, 0, 1, true, at::kCPU);
  for (const int64_t dp_size: {1, 2, 3, 4}) {
    for (const int64_t micro_batch: {1, 2, 6}) {
      if (24 % (micro_batch * dp_size) != 0) continue;
      std::vector<std::vector<MicroBatch>> ranks;
      for (int64_t rank = 0; rank < dp_size; ++rank)
        ranks.push_back(make_batch(rows, 48, 24, micro_batch, rank, dp_size, true, at::kCPU));
      std::vector<Tensor> tokens, labels;
      int64_t trained = 0;
      for (size_t m = 0; m < ranks[0].size(); ++m) {
        for (const auto& rank: ranks) {
          tokens.push_back(rank[m].tokens);
          labels.push_back(rank[m].labels);
          trained += rank[m].trained_tokens;
          EXPECT_EQ(rank[m].num_rows, micro_batch);
          EXPECT_EQ(rank[m].global_rows, 24);
          EXPECT_EQ(rank[m].global_trained_tokens, one[0].trained_tokens);
        }
      }
      EXPECT_TRUE(at::equal(at::cat(tokens), one[0].tokens));
      EXPECT_TRUE(at::equal(at::cat(labels), one[0].labels));
      EXPECT_EQ(trained, one[0].trained_tokens);
    }
  }
  EXPECT_ERROR(make_batch(rows, 0, 24, 2, 0, 5, true, at::kCPU), "24 is not divisible by 10");
}

TEST(MakeBatch, DoesNotDependOnTheCut) {
  const Scratch scratch;
  const RowStream stream(corpus_of(scratch, random_lengths(11, 50)), 17, 4, true, true);
  struct Whole {
    Tensor tokens, labels, positions;
    std::vector<int64_t> borders;
  };
  const auto whole = [&](int64_t micro_batch) {
    std::vector<Tensor> tokens, labels, positions;
    Whole result;
    int64_t offset = 0, trained = 0, rows = 0;
    for (const MicroBatch& batch: make_batch(stream, 24, 8, micro_batch, 0, 1, true, at::kCPU)) {
      tokens.push_back(batch.tokens);
      labels.push_back(batch.labels);
      positions.push_back(batch.positions);
      for (int64_t i = 0; i + 1 < batch.cu_seqlens.size(0); ++i)
        result.borders.push_back(offset + batch.cu_seqlens[i].item<int32_t>());
      EXPECT_TRUE(at::equal(batch.cu_seqlens, batch.cu_seqlens_host));
      EXPECT_EQ(batch.cu_seqlens[-1].item<int32_t>(), batch.num_tokens());
      EXPECT_EQ(batch.num_rows, micro_batch);
      EXPECT_EQ(batch.global_rows, 8);
      EXPECT_EQ(batch.row_id[-1].item<int32_t>(), micro_batch - 1);
      EXPECT_EQ(batch.trained_tokens, (batch.labels != -100).sum().item<int64_t>());
      EXPECT_LE(batch.max_seqlen, 17);
      EXPECT_EQ(batch.positions.max().item<int32_t>() + 1, batch.max_seqlen);
      trained += batch.trained_tokens;
      rows += batch.num_rows;
      offset += batch.num_tokens();
    }
    for (const MicroBatch& batch: make_batch(stream, 24, 8, micro_batch, 0, 1, true, at::kCPU))
      EXPECT_EQ(batch.global_trained_tokens, trained);
    EXPECT_EQ(rows, 8);
    result.tokens = at::cat(tokens), result.labels = at::cat(labels),
    result.positions = at::cat(positions);
    return result;
  };
  const Whole one = whole(8);
  EXPECT_EQ(one.tokens.size(0), 8 * 17);
  for (const int64_t micro_batch: {4, 2, 1}) {
    const Whole other = whole(micro_batch);
    EXPECT_TRUE(at::equal(one.tokens, other.tokens));
    EXPECT_TRUE(at::equal(one.labels, other.labels));
    EXPECT_TRUE(at::equal(one.positions, other.positions));
    EXPECT_EQ(one.borders, other.borders);
  }
  EXPECT_ERROR(make_batch(stream, 0, 8, 3, 0, 1, true, at::kCPU), "8 is not divisible by 3");
}

TEST(MakeBatch, WideIdsAndUnmaskedRows) {
  const Scratch scratch;
  CorpusWriter writer(scratch / "wide", 201088, "");
  writer.add_document(std::vector<int32_t>{65535, 65536, 151645, 201087}); // known-faults 55
  writer.add_document(std::vector<int32_t>{5, 6});
  writer.finish();
  const RowStream stream(Corpus(scratch / "wide"), 3, 0, false, false);
  const auto batch = make_batch(stream, 0, 2, 2, 0, 1, false, at::kCPU);
  const MicroBatch& micro = batch.at(0);
  const std::vector<int64_t> tokens(
    micro.tokens.data_ptr<int64_t>(), micro.tokens.data_ptr<int64_t>() + 6);
  EXPECT_EQ(tokens, (std::vector<int64_t>{65535, 65536, 151645, 201087, 5, 6}));
  EXPECT_EQ(micro.cu_seqlens.size(0), 3);
  EXPECT_EQ(micro.max_seqlen, 3);
  EXPECT_EQ(micro.trained_tokens, 6);
  EXPECT_EQ(micro.positions[5].item<int32_t>(), 2);
}

} // namespace
} // namespace pith
