#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "core/error.h"

namespace pith {
namespace {

TEST(ByteTokenizer, IdsAreBytesAndEndOfText) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  EXPECT_EQ(tokenizer.vocab_size(), 257);
  EXPECT_EQ(tokenizer.eos_id(), 256);
  EXPECT_EQ(tokenizer.encode("X.<|endoftext|>").ids, (std::vector<int32_t>{88, 46, 256}));
  EXPECT_EQ(tokenizer.encode("<|endoftext|>", {.parse_special = false}).ids.size(), 13u);
  EXPECT_EQ(tokenizer.encode("\xC3\xA9").ids, (std::vector<int32_t>{0xC3, 0xA9}));
  EXPECT_THROW(tokenizer.encode("\xC3", {.strict = true}), Error);
  EXPECT_EQ(tokenizer.encode("a\xC3").replaced_sequences, 1);
  const std::vector<int32_t> ids = {'a', 0xE4, 0xB8, 0xAD, 256, 'b', 0xE4};
  EXPECT_EQ(tokenizer.decode(ids), "a\u4E2Db\uFFFD");
  EXPECT_EQ(tokenizer.decode(ids, false), "a\u4E2D<|endoftext|>b\uFFFD");
}

TEST(ByteTokenizer, SurvivesSaveAndLoad) {
  const auto folder = std::filesystem::temp_directory_path() / "pith_byte_tokenizer";
  Tokenizer::bytes().save(folder);
  const Tokenizer loaded = Tokenizer::load(folder);
  EXPECT_EQ(loaded.hash(), Tokenizer::bytes().hash());
  EXPECT_EQ(loaded.eos_id(), 256);
  EXPECT_EQ(loaded.encode("ab<|endoftext|>").ids, (std::vector<int32_t>{97, 98, 256}));
  std::filesystem::remove_all(folder);
}

TEST(StreamingDecoder, NeverEmitsHalfACharacter) {
  StreamingDecoder decoder(Tokenizer::bytes());
  EXPECT_EQ(decoder.push('a'), "a");
  EXPECT_EQ(decoder.push(0xE4), "");
  EXPECT_EQ(decoder.push(0xB8), "");
  EXPECT_EQ(decoder.push(0xAD), "\u4E2D");
  EXPECT_EQ(decoder.push(0xE4), "");
  EXPECT_EQ(decoder.push('x'), "\uFFFDx");
  EXPECT_EQ(decoder.push(0xF0), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
}

}  // namespace
}  // namespace pith
