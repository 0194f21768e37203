#include "text/tokenizer.h"
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <filesystem>
#include <random>
#include "core/error.h"
#include "text/tokenizer_state.h"

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

// Any ids, pushed one by one, give the text that decode gives: byte tokens that are no UTF-8 too.
TEST(StreamingDecoder, EqualsDecode) {
  std::string vocab = R"("\u2581a":0,"\u4e2d":1,"b":2,"\u2581":3,"</s>":4)";
  int count = 5;
  for (const char* byte: {"E4", "B8", "AD", "FF", "41", "F0"})
    vocab += fmt::format(R"(,"<0x{}>":{})", byte, count++);
  const std::string replace = R"({"type":"Replace","pattern":{"String":"\u2581"},"content":" "},)";
  const std::string fallback = R"({"type":"ByteFallback"})";
  const Tokenizer bytes = Tokenizer::bytes();
  std::mt19937 random(11);
  for (const std::string& decoders:
    {replace + fallback,
      replace + fallback + R"(,{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0})",
      fallback + R"(,{"type":"Metaspace","replacement":"\u2581"})"}) {
    const Tokenizer tokenizer =
      Tokenizer::from_json(R"({"model":{"type":"BPE","byte_fallback":true,"merges":[],"vocab":{)" +
        vocab + R"(}},"added_tokens":[{"id":4,"content":"</s>","special":true}],)" +
        R"("decoder":{"type":"Sequence","decoders":[)" + decoders + "]}}");
    for (int round = 0; round < 3000; ++round) {
      std::vector<int32_t> ids(random() % 20);
      for (int32_t& id: ids) id = static_cast<int32_t>(random() % static_cast<unsigned>(count));
      StreamingDecoder stream(tokenizer);
      std::string all;
      for (const int32_t id: ids) {
        const std::string text = stream.push(id);
        ASSERT_NO_THROW(bytes.encode(text, {.strict = true})) << "half a character";
        all += text;
      }
      ASSERT_EQ(all + stream.finish(), tokenizer.decode(ids)) << fmt::format("{}", ids);
    }
  }
}

TEST(Tokenizer, RefusesByName) {
  auto message = [](std::string_view key, std::string_view value) -> std::string {
    std::string json = R"({"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[])";
    json += key.starts_with("model.") ? "," : "},";
    json += "\"" + std::string(key.starts_with("model.") ? key.substr(6) : key) + "\":";
    json += std::string(value) + (key.starts_with("model.") ? "}}" : "}");
    try {
      Tokenizer::from_json(json);
    } catch (const Error& error) { return error.what(); }
    return "accepted";
  };
  EXPECT_EQ(message("normalizer", "null"), "accepted");
  auto names = [&](const char* key, const char* value, const char* name) {
    EXPECT_NE(message(key, value).find(name), std::string::npos) << message(key, value);
  };
  names("normalizer", R"({"type":"BertNormalizer"})", "BertNormalizer");
  names("pre_tokenizer", R"({"type":"UnicodeScripts"})", "UnicodeScripts");
  names("decoder", R"({"type":"WordPiece"})", "WordPiece");
  names("post_processor", R"({"type":"BertProcessing"})", "BertProcessing");
  names("truncation", R"({"max_length":512})", "truncation");
  names("model.dropout", "0.1", "dropout");
  names("model.end_of_word_suffix", R"("</w>")", "end_of_word_suffix");
  names("model.unk_token", R"("<unk>")", "<unk>");
  names("added_tokens", R"([{"id":400000000,"content":"x"}])", "400000000");
}

TEST(Tokenizer, ReadsItsConfig) {
  const std::string json =
    R"({"model":{"type":"BPE","vocab":{"a":0,"<s>":1,"</s>":2},"merges":[]},"decoder":null})";
  const Tokenizer tokenizer = Tokenizer::from_json(
    json, R"({"bos_token":{"content":"<s>"},"eos_token":"</s>","pad_token":null,
                "chat_template":[{"name":"tool","template":"T"},
                                 {"name":"default","template":"D"}]})");
  EXPECT_EQ(tokenizer.bos_id(), 1);
  EXPECT_EQ(tokenizer.eos_id(), 2);
  EXPECT_EQ(tokenizer.pad_id(), std::nullopt);
  EXPECT_EQ(tokenizer.chat_template(), "D");
  EXPECT_EQ(tokenizer.encode("aza").dropped_characters, 1);
  EXPECT_THROW(tokenizer.encode("aza", {.strict = true}), Error);
  EXPECT_THROW(Tokenizer::from_json(json, R"({"eos_token":"<eos>"})"), Error);
}

TEST(Tokenizer, ServesManyThreadsAtOnce) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  std::vector<std::string> texts;
  for (int i = 0; i < 200; ++i)
    texts.push_back(std::string(static_cast<size_t>(i), 'x') + "\u00e9");
  std::vector<Encoding> batch(texts.size());
  const auto encode_all = [&](const EncodeOptions& options) {
    on_threads(
      4, texts.size(), [&](int, size_t i) { batch[i] = tokenizer.encode(texts[i], options); });
  };
  encode_all({});
  for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(batch[i].ids, tokenizer.encode(texts[i]).ids);
  texts[77] = "\xFF";
  EXPECT_THROW(encode_all({.strict = true}), Error);
}

} // namespace
} // namespace pith
