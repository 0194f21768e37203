// A tokenizer.json, then a text through what was loaded.
#include "tests/fuzz/fuzz.h"
#include "text/tokenizer.h"

PITH_FUZZ(input) {
  const pith::Tokenizer tokenizer = pith::Tokenizer::from_json(std::string(input));
  const std::string text =
    "I'LL say 123  <|end|> e\xCC\x81\xE4\xB8\xAD \xFF\n" + std::string(input);
  const pith::Encoding encoding = tokenizer.encode(text, {.offsets = true});
  if (encoding.offsets.size() != encoding.ids.size()) __builtin_trap();
  const std::string decoded = tokenizer.decode(encoding.ids);
  pith::StreamingDecoder stream(tokenizer);
  for (const int32_t id: encoding.ids) stream.push(id);
  stream.finish();
}
