#include "text/corpus_reader.h"
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>
#include <filesystem>
#include <fstream>
#include <random>
#include "core/error.h"

namespace pith {
namespace {
namespace fs = std::filesystem;

class CorpusReader : public testing::Test {
 protected:
  CorpusReader() {
    std::string name = (fs::temp_directory_path() / "ü b'$HOME-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~CorpusReader() override { fs::remove_all(folder_); }
  std::string put(const std::string& name, const std::string& bytes) const {
    const fs::path path = folder_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path.string();
  }
  static std::vector<Document> read(const std::vector<std::string>& paths,
    const ReadOptions& options = {}, InputPosition start = {}) {
    InputReader reader(list_inputs(paths, {}), options, start);
    std::vector<Document> all;
    for (Chunk chunk; reader.next(chunk);) {
      read_lines(chunk, options);
      for (Document& document: chunk.documents) all.push_back(std::move(document));
    }
    return all;
  }
  static std::string error_of(const std::vector<std::string>& paths) {
    try {
      read(paths);
    } catch (const Error& error) { return error.message(); }
    return "no error";
  }
  fs::path folder_;
};

std::string zstd(const std::string& bytes) {
  std::string out(ZSTD_compressBound(bytes.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), bytes.data(), bytes.size(), 1));
  return out;
}

std::string gzip(const std::string& bytes, const std::string& path) {
  gzFile file = gzopen(path.c_str(), "wb");
  gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
  gzclose(file);
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Lines of all lengths, some longer than a chunk, and what they hold.
std::string many_lines(std::vector<std::string>& texts) {
  std::mt19937 random(1);
  std::string lines;
  for (int i = 0; i < 2000; ++i) {
    const size_t length = i % 500 == 7 ? 700'000 + random() % 1000 : random() % 900;
    texts.emplace_back(length, static_cast<char>('a' + i % 26));
    lines += "{\"n\": {\"text\": \"" + texts.back() + "\"}}\n";
  }
  return lines;
}

TEST_F(CorpusReader, EveryCompressionGivesTheSameLines) {
  std::vector<std::string> texts;
  const std::string lines = many_lines(texts);
  const size_t half = lines.size() / 2;
  const std::string gz = (folder_ / "tmp").string();
  const std::vector<std::string> paths = {put("a.jsonl", lines), put("b.jsonl.zst", zstd(lines)),
    put("c.jsonl.gz", gzip(lines, gz)),
    // Frames one after the other, cut in the middle of a line.
    put("d.jsonl.zst", zstd(lines.substr(0, half)) + zstd(lines.substr(half))),
    put("e.jsonl.gz", gzip(lines.substr(0, half), gz) + gzip(lines.substr(half), gz)),
    put("no newline at the end.jsonl", lines.substr(0, lines.size() - 1))};
  for (const std::string& path: paths) {
    const auto documents = read({path}, {.text_field = "n.text"});
    ASSERT_EQ(documents.size(), texts.size()) << path;
    for (size_t i = 0; i < texts.size(); ++i) {
      ASSERT_EQ(documents[i].text, texts[i]) << path << i;
      ASSERT_EQ(documents[i].line, static_cast<int64_t>(i) + 1);
    }
  }
}

TEST_F(CorpusReader, GoesOnFromTheEndOfAnyChunk) {
  std::vector<std::string> texts;
  const std::string lines = many_lines(texts);
  const std::vector<std::string> paths = {put("0.txt", "whole"), put("1.jsonl.zst", zstd(lines)),
    put("2.jsonl", lines), put("3.txt", "last")};
  const ReadOptions options{.text_field = "n.text"};
  const auto all = read(paths, options);
  ASSERT_EQ(all.size(), 2 * texts.size() + 2);
  InputReader reader(list_inputs(paths, {}), options);
  size_t before = 0;
  for (Chunk chunk; reader.next(chunk);) {
    read_lines(chunk, options);
    before += chunk.documents.size();
    const auto rest = read(paths, options, chunk.end);
    ASSERT_EQ(rest.size(), all.size() - before);
    for (size_t i = 0; i < rest.size(); ++i) {
      ASSERT_EQ(rest[i].text, all[before + i].text);
      ASSERT_EQ(rest[i].line, all[before + i].line);
    }
  }
  EXPECT_EQ(before, all.size());
}

TEST_F(CorpusReader, BadLinesSayWhyAndWhere) {
  const std::string deep(5000, '['), deep_end(5000, ']');
  const std::string lines =
    "\xEF\xBB\xBF{\"text\": \"first\", \"id\": 7}\r\n\n  \t\n{\"text\": 5}\n{\"text\": null}\n"
    "{\"other\": \"x\"}\n[1, 2]\nnot json\n{\"text\": \"\xff\"}\n{\"text\": \"\\ud800\"}\n" +
    deep + deep_end + "\n{\"text\": " + deep + deep_end + "}\n{\"text\": \"" +
    std::string(100'000, 'x') + "\"}\n{\"text\": \"\"}\n{\"text\": \"a\\u0000b\", \"id\": \"z\"}";
  const ReadOptions options{.id_field = "id", .max_line = 50'000};
  const auto documents = read({put("x.jsonl", lines)}, options);
  const std::vector<std::pair<int, std::string>> expected = {{1, ""},
    {4, "\"text\" is 5, not text"}, {5, "\"text\" is null, not text"}, {6, "no field \"text\""},
    {7, "no field \"text\""}, {8, "not JSON"}, {9, "not JSON: The input is not valid UTF-8"},
    {10, "not JSON: Problem while parsing a string"}, {11, "too deep"}, {12, "too deep"},
    {13, "longer than 50000 bytes"}, {14, ""}, {15, ""}};
  ASSERT_EQ(documents.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(documents[i].line, expected[i].first);
    EXPECT_NE(documents[i].problem.find(expected[i].second), std::string::npos)
      << documents[i].problem;
    EXPECT_EQ(documents[i].problem.empty(), expected[i].second.empty()) << documents[i].problem;
  }
  EXPECT_EQ(documents[0].text, "first");
  EXPECT_EQ(documents[0].id, "7");
  EXPECT_EQ(documents[12].text, std::string("a\0b", 3));
  EXPECT_EQ(documents[12].id, "z");
}

TEST_F(CorpusReader, LinesTooLongToHoldArePassedOver) {
  // Longer than several reads, in the middle, at the end, and without a newline.
  const std::string huge(3'000'000, 'x');
  const ReadOptions options{.max_line = 1'000'000};
  for (const std::string tail: {"", "\n", "\n{\"text\": \"b\"}\n"}) {
    const auto documents = read({put("x.jsonl", "{\"text\": \"a\"}\n" + huge + tail)}, options);
    ASSERT_EQ(documents.size(), tail.size() > 1 ? 3u : 2u);
    EXPECT_EQ(documents[1].line, 2);
    EXPECT_NE(documents[1].problem.find("longer than 1000000"), std::string::npos);
    if (tail.size() > 1) {
      EXPECT_EQ(documents[2].text, "b");
      EXPECT_EQ(documents[2].line, 3);
    }
  }
  const auto whole =
    read({put("x.txt", huge), put("y.txt.zst", zstd(huge)), put("z.txt", "z")}, options);
  ASSERT_EQ(whole.size(), 3u);
  EXPECT_NE(whole[0].problem.find("longer than"), std::string::npos);
  EXPECT_NE(whole[1].problem.find("longer than"), std::string::npos);
  EXPECT_EQ(whole[2].text, "z");
}

TEST_F(CorpusReader, DamagedFilesAreNamed) {
  const std::string line = "{\"text\": \"some text that is compressed\"}\n";
  std::string lines;
  for (int i = 0; i < 3000; ++i) lines += std::to_string(i) + line;
  const std::string z = zstd(lines), g = gzip(lines, (folder_ / "tmp").string());
  for (const size_t size: {size_t{0}, size_t{3}, z.size() / 2, z.size() - 1}) {
    const std::string error = error_of({put("cut.jsonl.zst", z.substr(0, size))});
    EXPECT_NE(error.find("cut.jsonl.zst is cut short"), std::string::npos) << size << error;
  }
  for (const size_t size: {size_t{20}, g.size() / 2, g.size() - 1}) {
    const std::string error = error_of({put("cut.jsonl.gz", g.substr(0, size))});
    EXPECT_NE(error.find("cut.jsonl.gz"), std::string::npos) << size << error;
    EXPECT_NE(error.find("cut short"), std::string::npos) << size << error;
  }
  EXPECT_NE(error_of({put("x.jsonl.zst", lines)}).find("cannot decompress"), std::string::npos);
  EXPECT_NE(error_of({put("x.jsonl.gz", lines)}).find("is not gzip data"), std::string::npos);
  EXPECT_NE(error_of({put("x.jsonl.gz", "")}).find("x.jsonl.gz"), std::string::npos);
  EXPECT_NE(error_of({(folder_ / "nowhere").string()}).find("does not exist"), std::string::npos);
  EXPECT_NE(error_of({"/proc/self/mem"}).find("cannot read /proc/self/mem"), std::string::npos);
  if (::geteuid() != 0) {
    fs::permissions(put("closed.jsonl", lines), fs::perms::none);
    EXPECT_NE(
      error_of({(folder_ / "closed.jsonl").string()}).find("cannot read"), std::string::npos);
  }
}

TEST_F(CorpusReader, ListsFoldersAndGlobsInOrder) {
  for (const char* name:
    {"b/2.jsonl.zst", "b/1.jsonl", "a/3.txt", "a/.hidden.txt", "a/Makefile", ".git/4.txt"})
    put(name, "x");
  fs::create_symlink("..", folder_ / "a" / "loop");
  const auto names = [&](const std::string& path, const std::vector<std::string>& endings) {
    std::string all;
    for (const InputFile& file: list_inputs({(folder_ / path).string()}, endings))
      all += fs::relative(file.path, folder_).string() + " ";
    return all;
  };
  EXPECT_EQ(names("", {}), "a/3.txt a/Makefile b/1.jsonl b/2.jsonl.zst ");
  EXPECT_EQ(names("", {".jsonl.zst", "none"}), "a/Makefile b/2.jsonl.zst ");
  EXPECT_EQ(names("b/*.jsonl*", {}), "b/1.jsonl b/2.jsonl.zst ");
  EXPECT_EQ(names("a/.hidden.txt", {".jsonl"}), "a/.hidden.txt ");
}

TEST_F(CorpusReader, WorkersDoNotChangeAnything) {
  std::vector<std::string> texts;
  const std::string lines = many_lines(texts);
  put("a.jsonl.zst", zstd(lines));
  put("b.txt", std::string("\xff\xfe", 2));
  put("c.jsonl", "{\"n\": {\"text\": \"ok\"}}\nbad\n{\"n\": {\"text\": \"\"}}\n");
  put("d.jsonl.zst", zstd(lines).substr(0, 2000)); // the error comes last
  std::vector<std::string> results;
  for (const int workers: {1, 2, 3, 8}) {
    EncodeSettings settings;
    settings.read.text_field = "n.text";
    settings.end_id = 256;
    settings.workers = workers;
    settings.max_length = 800'000;
    settings.min_length = 1;
    settings.bytes_in_flight = 1'000'000;
    CorpusEncoder encoder(list_inputs({folder_.string()}, {}), Tokenizer::bytes(), settings, {});
    std::string& result = results.emplace_back();
    Chunk chunk;
    try {
      while (encoder.next(chunk)) {
        for (const Document& document: chunk.documents) {
          result += document.problem + document.skipped + " " + std::to_string(document.line) +
            " " + std::to_string(document.hash) + " ";
          for (const int32_t id: document.ids) result += static_cast<char>(id);
        }
      }
    } catch (const Error& error) { result += error.message(); }
    EXPECT_NE(result.find("d.jsonl.zst is cut short"), std::string::npos);
    EXPECT_TRUE(result == results[0]) << workers;
  }
  // Giving up early ends all threads.
  EncodeSettings settings;
  settings.workers = 3;
  CorpusEncoder encoder(list_inputs({folder_.string()}, {}), Tokenizer::bytes(), settings, {});
  Chunk chunk;
  EXPECT_TRUE(encoder.next(chunk));
}

} // namespace
} // namespace pith
