#include "engine/batches.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>

#include <random>
#include <set>
#include <thread>

#include "tests/engine/scratch.h"

namespace pith {
namespace {

// Document d has ids 1000 d, 1000 d + 1, ...: every token says where it comes from.
Corpus corpus_of(const Scratch& scratch, const std::vector<int>& lengths) {
  CorpusWriter writer(scratch / "c", 201088, "");
  for (size_t d = 0; d < lengths.size(); ++d) {
    std::vector<int32_t> ids(static_cast<size_t>(lengths[d]));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(1000 * d + i);
    writer.add_document(ids);
  }
  writer.finish();
  return Corpus((scratch / "c").string());
}

std::vector<int> random_lengths(uint32_t seed, size_t count) {
  std::mt19937 random(seed);
  std::vector<int> lengths(count);
  for (int& length : lengths)
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
  for (const bool shuffle : {false, true}) {
    for (const int64_t length : {1, 7, 32, 64, 5000}) {
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
          EXPECT_TRUE(row_border || orders[e][i] % 1000 == 0 ||
                      orders[e][i] == orders[e][i - 1] + 1);
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
  for (const int64_t length : {1, 5, 33, 4000}) {
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
    }
    EXPECT_GT(trained, 0);
  }
}

TEST(RowStream, WithoutMaskRowsAreOneDocumentAndLabelsCross) {
  const Scratch scratch;
  const Corpus corpus = corpus_of(scratch, {3, 5, 4});
  const RowStream stream(corpus, 5, 0, false, false);
  const Row first = stream.row(0), second = stream.row(1), third = stream.row(2);
  EXPECT_EQ(first.tokens, (std::vector<int64_t>{0, 1, 2, 1000, 1001}));
  EXPECT_EQ(first.labels, (std::vector<int64_t>{1, 2, 1000, 1001, 1002}));
  EXPECT_EQ(second.labels, (std::vector<int64_t>{1003, 1004, 2000, 2001, 2002}));
  EXPECT_EQ(third.tokens, (std::vector<int64_t>{2002, 2003, 0, 1, 2}));  // into the next epoch
  EXPECT_EQ(third.labels, (std::vector<int64_t>{2003, 0, 1, 2, 1000}));
  for (const Row& row : {first, second, third}) {
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
    for (int64_t& token : tokens) token /= 1000;
    return tokens;
  };
  EXPECT_EQ(order(0), (std::vector<int64_t>{2, 5, 4, 0, 3, 1, 7, 6}));
  EXPECT_EQ(order(1), (std::vector<int64_t>{1, 4, 6, 5, 3, 7, 0, 2}));
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
  for (const auto& [order, count] : counts) chi_square += (count - 200.0) * (count - 200.0) / 200.0;
  EXPECT_LT(chi_square, 20.5);
}

TEST(RowStream, TinyCorporaAndBounds) {
  const Scratch scratch;
  const RowStream stream(corpus_of(scratch, {0, 2, 0}), 7, 1, true,
                         true);  // a row spans four epochs
  const Row row = stream.row(1);
  EXPECT_EQ(row.tokens, (std::vector<int64_t>{1001, 1000, 1001, 1000, 1001, 1000, 1001}));
  EXPECT_EQ(row.labels, (std::vector<int64_t>{-100, 1001, -100, 1001, -100, 1001, -100}));
  EXPECT_EQ(row.positions, (std::vector<int64_t>{0, 0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(row.document_begins, (std::vector<int64_t>{0, 1, 3, 5}));
  EXPECT_EQ(stream.rows_per_epoch(), 0);
  EXPECT_ERROR(stream.row(-1), "row -1");
  EXPECT_ERROR(stream.row(int64_t{1} << 62), "outside the stream");
  EXPECT_ERROR(RowStream(corpus_of(scratch, {0}), 7, 1, true, true), "is empty");
  EXPECT_ERROR(RowStream(corpus_of(scratch, {3}), 0, 1, true, true), "sequence length 0");
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
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
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
    for (const MicroBatch& batch : make_batch(stream, 24, 8, micro_batch, true, at::kCPU)) {
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
    for (const MicroBatch& batch : make_batch(stream, 24, 8, micro_batch, true, at::kCPU))
      EXPECT_EQ(batch.global_trained_tokens, trained);
    EXPECT_EQ(rows, 8);
    result.tokens = at::cat(tokens), result.labels = at::cat(labels),
    result.positions = at::cat(positions);
    return result;
  };
  const Whole one = whole(8);
  EXPECT_EQ(one.tokens.size(0), 8 * 17);
  for (const int64_t micro_batch : {4, 2, 1}) {
    const Whole other = whole(micro_batch);
    EXPECT_TRUE(at::equal(one.tokens, other.tokens));
    EXPECT_TRUE(at::equal(one.labels, other.labels));
    EXPECT_TRUE(at::equal(one.positions, other.positions));
    EXPECT_EQ(one.borders, other.borders);
  }
  EXPECT_ERROR(make_batch(stream, 0, 8, 3, true, at::kCPU), "8 is not divisible by 3");
}

TEST(MakeBatch, WideIdsAndUnmaskedRows) {
  const Scratch scratch;
  CorpusWriter writer(scratch / "wide", 201088, "");
  writer.add_document(std::vector<int32_t>{65535, 65536, 151645, 201087});  // known-faults 55
  writer.add_document(std::vector<int32_t>{5, 6});
  writer.finish();
  const RowStream stream(Corpus(scratch / "wide"), 3, 0, false, false);
  const auto batch = make_batch(stream, 0, 2, 2, false, at::kCPU);
  const MicroBatch& micro = batch.at(0);
  const std::vector<int64_t> tokens(micro.tokens.data_ptr<int64_t>(),
                                    micro.tokens.data_ptr<int64_t>() + 6);
  EXPECT_EQ(tokens, (std::vector<int64_t>{65535, 65536, 151645, 201087, 5, 6}));
  EXPECT_EQ(micro.cu_seqlens.size(0), 3);
  EXPECT_EQ(micro.max_seqlen, 3);
  EXPECT_EQ(micro.trained_tokens, 6);
  EXPECT_EQ(micro.positions[5].item<int32_t>(), 2);
}

TEST(MakeBatch, RowsThatMakeNoSenseAreRefused) {
  Row row{{1, 2}, {2}, {0, 1}, {0}};
  EXPECT_ERROR(make_microbatch({row}, true, 1, 1, at::kCPU), "1 labels");
  row = {{1, 2}, {2, 3}, {0, 1}, {0, 2}};
  EXPECT_ERROR(make_microbatch({row}, true, 1, 1, at::kCPU), "not in order");
  row = {{1, 2}, {2, 3}, {0, 1}, {1}};
  EXPECT_ERROR(make_microbatch({row}, true, 1, 1, at::kCPU), "row 0");
}

}  // namespace
}  // namespace pith
