#include "engine/corpus.h"
#include <cstring>
#include <random>
#include "tests/engine/scratch.h"

namespace pith {
namespace {
using Documents = std::vector<std::vector<int32_t>>;

std::string write(const Scratch& scratch, const Documents& documents, int64_t vocab_size = 257) {
  const std::string prefix = (scratch / "corpus").string();
  CorpusWriter writer(prefix, vocab_size, "hash");
  for (const auto& document: documents) writer.add_document(document);
  writer.finish();
  return prefix;
}

std::vector<int64_t> read(const Corpus& corpus, int64_t document) {
  std::vector<int64_t> ids(static_cast<size_t>(corpus.length(document)));
  corpus.read(document, 0, ids);
  return ids;
}

// Bytes of an index written without our writer.
std::string index_of(uint8_t code, int64_t width, const std::vector<int32_t>& lengths,
  const std::vector<int64_t>& borders) {
  std::string bytes("MMIDIDX\0\0", 9);
  const auto put = [&](auto value) { bytes.append(reinterpret_cast<char*>(&value), sizeof value); };
  put(uint64_t{1});
  put(code);
  put(uint64_t{lengths.size()});
  put(uint64_t{borders.size()});
  for (const int32_t length: lengths) put(length);
  int64_t pointer = 0;
  for (const int32_t length: lengths) {
    put(pointer);
    pointer += length * width;
  }
  for (const int64_t border: borders) put(border);
  return bytes;
}

TEST(Corpus, RoundTripAtBothWidths) {
  // Known-faults 55: ids beyond 16 bits survive.
  const Documents documents{{65535, 0}, {}, {7}, {1, 2, 3}};
  for (const int64_t vocab_size: {int64_t{65536}, int64_t{65537}, int64_t{1} << 31}) {
    const Scratch scratch;
    const Corpus corpus(write(scratch, documents, vocab_size));
    EXPECT_EQ(corpus.dtype(), vocab_size == 65536 ? "uint16" : "int32");
    EXPECT_EQ(corpus.num_documents(), 4);
    EXPECT_EQ(corpus.num_tokens(), 6);
    EXPECT_EQ(corpus.vocab_size(), vocab_size);
    EXPECT_EQ(corpus.tokenizer_hash(), "hash");
    for (size_t d = 0; d < documents.size(); ++d)
      EXPECT_EQ(read(corpus, static_cast<int64_t>(d)),
        std::vector<int64_t>(documents[d].begin(), documents[d].end()));
    EXPECT_TRUE(verify_corpus(corpus.prefix()).empty());
    EXPECT_FALSE(std::filesystem::exists(corpus.prefix() + ".bin.tmp"));
  }
  const Scratch scratch;
  const Corpus corpus(write(scratch, {{65536, 151645}, {201087, 200006}}, 201088));
  EXPECT_EQ(read(corpus, 0), (std::vector<int64_t>{65536, 151645}));
  EXPECT_EQ(read(corpus, 1), (std::vector<int64_t>{201087, 200006}));
  std::vector<int64_t> part(1);
  corpus.read(1, 1, part);
  EXPECT_EQ(part[0], 200006);
  EXPECT_ERROR(corpus.read(1, 2, part), "document 1 has 2 tokens");
  EXPECT_ERROR(corpus.read(2, 0, part), "no document 2 among 2");
  EXPECT_ERROR(corpus.length(-1), "no document -1");
}

TEST(Corpus, WriterRefusesIdsOutsideTheVocabularyAndLeavesNothingUnfinished) {
  const Scratch scratch;
  const std::string prefix = (scratch / "c").string();
  {
    CorpusWriter writer(prefix, 257, "");
    writer.add_document(std::vector<int32_t>{1, 256});
    EXPECT_ERROR(writer.add_document(std::vector<int32_t>{1, 257}), "document 1, token 1: id 257");
    EXPECT_ERROR(writer.add_document(std::vector<int32_t>{-1}), "id -1");
  }
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path));
  EXPECT_ERROR(Corpus{prefix}, "there is no corpus", prefix);
  EXPECT_ERROR(CorpusWriter((scratch.path / "").string(), 257, ""), "names a folder");
  // A build that dies leaves the old corpus as it was.
  write(scratch, {{1, 2}});
  { CorpusWriter(scratch / "corpus", 257, "").add_document(std::vector<int32_t>{9}); }
  EXPECT_EQ(Corpus(scratch / "corpus").num_tokens(), 2);
}

// The bytes of every file, by name.
std::map<std::string, std::string> files_in(const Scratch& scratch) {
  std::map<std::string, std::string> files;
  for (const auto& entry: std::filesystem::directory_iterator(scratch.path))
    files[entry.path().filename().string()] = read_file(entry.path());
  return files;
}

TEST(Corpus, ShardsAreOneCorpus) {
  Documents documents;
  for (int32_t d = 0; d < 20; ++d) documents.emplace_back(static_cast<size_t>(d * 7 % 11), d);
  const Scratch one, many;
  const Corpus whole(write(one, documents));
  const std::string prefix = (many / "corpus").string();
  write(many, documents); // an older corpus there goes
  CorpusWriter writer(prefix, 257, "hash", 12);
  for (const auto& document: documents) writer.add_document(document);
  writer.finish();
  const auto shards = corpus_shards(prefix);
  EXPECT_GT(shards.size(), 5u);
  EXPECT_EQ(files_in(many).size(), 3 * shards.size());
  const Corpus cut(prefix);
  EXPECT_EQ(cut.num_tokens(), whole.num_tokens());
  ASSERT_EQ(cut.num_documents(), whole.num_documents());
  for (int64_t d = 0; d < cut.num_documents(); ++d) EXPECT_EQ(cut.ids(d), whole.ids(d));
  for (const std::string& shard: shards) EXPECT_LE(Corpus(shard).num_tokens(), 12);
  EXPECT_TRUE(verify_corpus(prefix).empty());
  EXPECT_NE(cut.fingerprint(), whole.fingerprint());
  put_bytes(shards[2] + ".bin", std::string(read_file(shards[2] + ".bin").size(), '\xff'));
  EXPECT_NE(verify_corpus(prefix).at(0).find(shards[2]), std::string::npos);
  std::filesystem::remove(shards[3] + ".idx");
  EXPECT_ERROR(Corpus{prefix}, "there is no corpus", shards[3]);
  put_bytes(prefix + "-00000-of-00002.idx", "");
  EXPECT_ERROR(Corpus{prefix}, "shards of two corpora");
}

// Whatever was written after the last sync, going on from there gives the same files.
TEST(Corpus, WritingGoesOnFromWhatWasDurable) {
  std::mt19937 random(5);
  Documents documents(60);
  for (auto& document: documents)
    document.assign(random() % 9000, static_cast<int32_t>(random() % 257));
  for (const int64_t shard_tokens: {0, 40'000}) {
    const Scratch straight, broken;
    CorpusWriter whole(straight / "c", 257, "hash", shard_tokens);
    for (const auto& document: documents) whole.add_document(document);
    whole.finish();
    size_t done = 0;
    for (CorpusProgress at; done < documents.size();) {
      CorpusWriter writer(broken / "c", 257, "hash", shard_tokens, &at);
      const size_t durable = std::min(documents.size(), done + random() % 9);
      for (; done < durable; ++done) writer.add_document(documents[done]);
      at = writer.sync();
      if (done == documents.size()) {
        const int64_t shards = writer.close();
        // Interrupted between two renames.
        const std::string name = shards > 0 ? "c-00000" : "c",
                          last = shards > 0 ? fmt::format("c-00000-of-{:05}", shards) : "c";
        std::filesystem::rename(broken / (name + ".bin.tmp"), broken / (last + ".bin"));
        publish_corpus(broken / "c", shards);
        break;
      }
      for (size_t lost = done; lost < std::min(documents.size(), done + random() % 9); ++lost)
        writer.add_document(documents[lost]);
    }
    EXPECT_TRUE(files_in(broken) == files_in(straight)) << shard_tokens;
    EXPECT_TRUE(verify_corpus(broken / "c").empty());
  }
  const Scratch scratch;
  put_bytes(scratch / "c.bin.tmp", "abc");
  const CorpusProgress more{.documents = 1, .tokens = 7};
  EXPECT_ERROR(CorpusWriter(scratch / "c", 257, "", 0, &more), "c.bin.tmp has 3 bytes, fewer than");
}

TEST(Corpus, ReadsOtherProgramsFilesWithSeveralSequencesADocument) {
  const Scratch scratch;
  const std::string prefix = (scratch / "other").string();
  put_bytes(prefix + ".bin", std::string("\1\0\2\0\3\0\4\0\5\0\6\0\7\0\x80\xff", 16));
  put_bytes(prefix + ".idx", index_of(8, 2, {3, 0, 2, 3}, {0, 2, 2, 4}));
  const Corpus corpus(prefix);
  EXPECT_EQ(corpus.num_documents(), 3);
  EXPECT_EQ(corpus.vocab_size(), 0);
  EXPECT_EQ(read(corpus, 0), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_TRUE(read(corpus, 1).empty());
  EXPECT_EQ(read(corpus, 2), (std::vector<int64_t>{4, 5, 6, 7, 65408}));
  EXPECT_TRUE(verify_corpus(prefix).empty());
  put_bytes(prefix + ".idx", index_of(4, 4, {4}, {0, 1})); // the last id is negative
  EXPECT_ERROR(read(Corpus(prefix), 0), "document 0, token 3: id -8388601");
  EXPECT_NE(verify_corpus(prefix).at(0).find("document 0, token 3"), std::string::npos);
  put_bytes(prefix + ".idx", index_of(7, 4, {2}, {0, 1}));
  EXPECT_ERROR(Corpus{prefix}, "dtype code 7");
  put_bytes(prefix + ".json", R"({"name": "something else"})");
  EXPECT_ERROR(Corpus{prefix}, "other.json: not the side file");
}

TEST(Corpus, HostileIndexesAreRefused) {
  const auto parse = [](const std::string& bytes, uint64_t bin) {
    parse_corpus_index(bytes, bin, "x.idx");
  };
  const std::string good = index_of(4, 4, {2, 1}, {0, 1, 2});
  parse(good, 12);
  EXPECT_ERROR(parse(good, 11), "x.idx", "document 1 ends at token 3, the .bin holds 2");
  EXPECT_ERROR(parse(good, 13), "fill 12 bytes, the .bin has 13");
  EXPECT_ERROR(
    parse(index_of(4, 4, {2, -1}, {0, 1, 2}), 12), "document 1: its tokens do not follow");
  EXPECT_ERROR(
    parse(index_of(8, 4, {2, 1}, {0, 1, 2}), 12), "document 1: its tokens do not follow");
  EXPECT_ERROR(parse(index_of(4, 4, {2, 1}, {0, 2, 1, 2}), 12), "document 1 goes from 2 to 1 of 2");
  EXPECT_ERROR(parse(index_of(4, 4, {2, 1}, {0, 1}), 12), "do not span all 2 sequences");
  EXPECT_ERROR(parse(index_of(4, 4, {2, 1}, {}), 12), "list of documents is empty");
  EXPECT_ERROR(parse(index_of(4, 4, {1}, {0, int64_t{1} << 62, 1}), 4),
    "document 0 goes from 0 to 4611686018427387904");
  for (size_t size = 0; size < good.size(); ++size)
    EXPECT_ERROR(parse(good.substr(0, size), 12), "x.idx");
  std::string huge = good;
  std::memset(huge.data() + 18, 0xff, 16); // both counts 2^64 - 1
  EXPECT_ERROR(parse(huge, 12), "do not hold");
}

TEST(Corpus, TruncationAndBitFlipsAreFoundInEveryFile) {
  const Scratch scratch;
  std::mt19937 random(3);
  Documents documents(40);
  for (auto& document: documents) {
    document.resize(random() % 20000);
    for (auto& id: document) id = static_cast<int32_t>(random() % 257);
  }
  const std::string prefix = write(scratch, documents);
  for (const std::string extension: {".bin", ".idx", ".json"}) {
    const std::string good = read_file(prefix + extension);
    for (size_t size: {size_t{0}, good.size() / 2, good.size() - 1}) {
      put_bytes(prefix + extension, good.substr(0, size));
      EXPECT_ERROR(Corpus{prefix}, prefix);
      EXPECT_FALSE(verify_corpus(prefix).empty());
    }
    for (int i = 0; i < 60; ++i) {
      std::string bad = good;
      const size_t at = random() % good.size();
      bad[at] = static_cast<char>(bad[at] ^ (1 << random() % 8));
      put_bytes(prefix + extension, bad);
      const auto problems = verify_corpus(prefix);
      ASSERT_FALSE(problems.empty());
      if (extension != ".bin") {
        EXPECT_ERROR(Corpus{prefix}, prefix, extension);
        continue;
      }
      // The documents named must hold the byte.
      size_t document = 0, end = documents[0].size() * 2;
      while (end <= at) end += documents[++document].size() * 2;
      size_t first = 0, last = 0;
      const size_t text = problems[0].find("documents ");
      ASSERT_NE(text, std::string::npos) << problems[0];
      ASSERT_EQ(std::sscanf(problems[0].c_str() + text, "documents %zu to %zu", &first, &last), 2);
      EXPECT_TRUE(first <= document && document <= last);
      EXPECT_LT(last - first, documents.size() - 1);
    }
    put_bytes(prefix + extension, good);
  }
  EXPECT_TRUE(verify_corpus(prefix).empty());
}

TEST(Corpus, FingerprintChangesWithTheCorpus) {
  const Scratch a, b, c;
  const std::string first = Corpus(write(a, {{1, 2}, {3}})).fingerprint();
  EXPECT_EQ(first, Corpus(write(b, {{1, 2}, {3}})).fingerprint());
  EXPECT_NE(first, Corpus(write(b, {{1}, {2, 3}})).fingerprint());
  EXPECT_NE(first, Corpus(write(c, {{1, 2}, {4}})).fingerprint());
}

TEST(Corpus, EmptyCorpora) {
  const Scratch scratch;
  const Corpus none(write(scratch, {}));
  EXPECT_EQ(none.num_documents(), 0);
  EXPECT_TRUE(verify_corpus(none.prefix()).empty());
  const Corpus empty(write(scratch, {{}}));
  EXPECT_EQ(empty.num_documents(), 1);
  EXPECT_EQ(empty.num_tokens(), 0);
}

TEST(Corpus, IndexesPastTwoToThe31Tokens) {
  // Only the index is real: 3 documents of 2^31 - 1 tokens.
  const int32_t most = std::numeric_limits<int32_t>::max();
  const std::string bytes = index_of(4, 4, {most, most, most}, {0, 1, 2, 3});
  const CorpusIndex index = parse_corpus_index(bytes, 12ull * static_cast<uint64_t>(most), "x");
  EXPECT_EQ(index.num_tokens, 3ll * most);
  EXPECT_EQ(index.begin(2), 2ll * most);
}

} // namespace
} // namespace pith
