// The ids, offsets and texts that Hugging Face `tokenizers` makes, kept in golden/tokenizers.json
// by tests/oracle/tokenizers/make_zoo.py. Entries without a tokenizer are checked where the
// environment variable PITH_TOKENIZERS names a folder that holds NAME/tokenizer.json.
#include <gtest/gtest.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include "text/tokenizer.h"

namespace pith {
namespace {
using Json = nlohmann::json;

void check(const Tokenizer& tokenizer, const Json& cases) {
  for (const Json& test: cases) {
    const auto text = test[0].get<std::string>();
    SCOPED_TRACE(test[0].dump());
    const Encoding encoding = tokenizer.encode(text, {.offsets = true});
    EXPECT_EQ(encoding.ids, test[1].get<std::vector<int32_t>>());
    std::vector<uint32_t> offsets;
    for (const TokenSpan& span: encoding.offsets) {
      offsets.push_back(span.begin);
      offsets.push_back(span.end);
    }
    EXPECT_EQ(offsets, test[2].get<std::vector<uint32_t>>());
    EXPECT_EQ(tokenizer.encode(text).ids, encoding.ids);
    const auto decoded = test[3].get<std::string>();
    EXPECT_EQ(tokenizer.decode(encoding.ids), decoded);
    StreamingDecoder stream(tokenizer);
    std::string streamed;
    for (const int32_t id: encoding.ids) streamed += stream.push(id);
    EXPECT_EQ(streamed + stream.finish(), decoded);
  }
}

TEST(Golden, EqualsHuggingFace) {
  std::ifstream file(PITH_SOURCE_DIR "/tests/text/golden/tokenizers.json");
  const Json golden = Json::parse(file);
  const char* folder = std::getenv("PITH_TOKENIZERS");
  int checked = 0;
  for (const Json& entry: golden) {
    const auto name = entry["name"].get<std::string>();
    SCOPED_TRACE(name);
    if (entry.contains("tokenizer")) {
      check(Tokenizer::from_json(entry["tokenizer"].dump()), entry["cases"]);
      ++checked;
    } else if (folder && std::filesystem::exists(std::filesystem::path(folder) / name)) {
      check(Tokenizer::load(std::filesystem::path(folder) / name), entry["cases"]);
      ++checked;
    }
  }
  EXPECT_GE(checked, 8);
}

} // namespace
} // namespace pith
