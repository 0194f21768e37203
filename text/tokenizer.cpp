#include "text/tokenizer.h"

#include <xxhash.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <unordered_map>

#include "core/error.h"
#include "text/unicode.h"

namespace pith {

using Json = nlohmann::json;

struct Tokenizer::State {
  std::string json, config;  // the files as they were read: save() writes them back
  std::vector<std::string> tokens;
  std::unordered_map<std::string, int32_t> ids;
  std::vector<char> special;
  std::string end_of_text;
  std::string chat_template;
  std::optional<int32_t> eos;
};

namespace {

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  PITH_CHECK(file, "cannot open {}", path.string());
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

}  // namespace

Tokenizer Tokenizer::from_json(std::string tokenizer_json, std::string tokenizer_config) {
  auto state = std::make_shared<State>();
  const Json file = Json::parse(tokenizer_json, nullptr, false);
  PITH_CHECK(file.is_object(), "tokenizer.json is not a JSON object");
  PITH_CHECK(file["model"].value("merges", Json::array()).empty(),
             "tokenizer.json: merges are not supported yet");
  auto put = [&](const std::string& token, int32_t id, bool special) {
    PITH_CHECK(id >= 0 && id < 1 << 24, "tokenizer.json: token id {} is out of range", id);
    if (state->tokens.size() <= size_t(id)) {
      state->tokens.resize(id + 1);
      state->special.resize(id + 1);
    }
    state->tokens[id] = token;
    state->special[id] = special;
    state->ids[token] = id;
  };
  for (const auto& [token, id] : file["model"]["vocab"].items()) put(token, id, false);
  for (const Json& added : file["added_tokens"])
    put(added["content"], added["id"], added.value("special", false));
  if (!tokenizer_config.empty()) {
    const Json config = Json::parse(tokenizer_config, nullptr, false);
    PITH_CHECK(config.is_object(), "tokenizer_config.json is not a JSON object");
    if (auto eos = config.find("eos_token"); eos != config.end() && eos->is_string()) {
      state->end_of_text = eos->get<std::string>();
      state->eos = state->ids.at(state->end_of_text);
    }
    state->chat_template = config.value("chat_template", "");
  }
  state->json = std::move(tokenizer_json);
  state->config = std::move(tokenizer_config);
  return Tokenizer(std::move(state));
}

Tokenizer Tokenizer::bytes() {
  Json vocab = Json::object();
  for (int byte = 0; byte < 256; ++byte) {
    std::string token;
    utf8_append(byte_to_char(byte), token);
    vocab[token] = byte;
  }
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", false},
                           {"use_regex", false}};
  const Json file = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", Json::array({{{"id", 256},
                                     {"content", "<|endoftext|>"},
                                     {"single_word", false},
                                     {"lstrip", false},
                                     {"rstrip", false},
                                     {"normalized", false},
                                     {"special", true}}})},
      {"normalizer", nullptr},
      {"pre_tokenizer", byte_level},
      {"post_processor", byte_level},
      {"decoder", byte_level},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"ignore_merges", false},
        {"vocab", vocab},
        {"merges", Json::array()}}}};
  const Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                       {"eos_token", "<|endoftext|>"},
                       {"clean_up_tokenization_spaces", false}};
  return from_json(file.dump(1) + "\n", config.dump(1) + "\n");
}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return from_json(read_file(path));
  const auto config = path / "tokenizer_config.json";
  return from_json(read_file(path / "tokenizer.json"),
                   std::filesystem::exists(config) ? read_file(config) : "");
}

Tokenizer Tokenizer::load_tiktoken(const std::filesystem::path& path, std::string_view,
                                   const std::vector<std::pair<std::string, int32_t>>&) {
  PITH_FAIL("{}: tiktoken ranks are not supported yet", path.string());
}

void Tokenizer::save(const std::filesystem::path& folder) const {
  std::filesystem::create_directories(folder);
  auto write = [&](const char* name, const std::string& content) {
    std::ofstream file(folder / name, std::ios::binary);
    file << content;
    file.close();
    PITH_CHECK(file, "cannot write {}", (folder / name).string());
  };
  write("tokenizer.json", state_->json);
  if (!state_->config.empty()) write("tokenizer_config.json", state_->config);
}

Encoding Tokenizer::encode(std::string_view input, const EncodeOptions& options) const {
  PITH_CHECK(!options.offsets, "offsets are not supported yet");
  Encoding encoding;
  std::string repaired;
  if (utf8_valid_prefix(input) < input.size()) {
    encoding.replaced_sequences = utf8_replace_invalid(input, repaired);
    PITH_CHECK(!options.strict, "text has {} ill-formed UTF-8 sequences, the first at byte {}",
               encoding.replaced_sequences, utf8_valid_prefix(input));
    input = repaired;
  }
  const std::string& marker = state_->end_of_text;
  for (size_t at = 0; at < input.size();) {
    if (options.parse_special && !marker.empty() && input.substr(at).starts_with(marker)) {
      encoding.ids.push_back(*state_->eos);
      at += marker.size();
    } else {
      encoding.ids.push_back(static_cast<uint8_t>(input[at++]));
    }
  }
  return encoding;
}

std::vector<Encoding> Tokenizer::encode_batch(std::span<const std::string> texts, int,
                                              const EncodeOptions& options) const {
  std::vector<Encoding> encodings;
  for (const std::string& text : texts) encodings.push_back(encode(text, options));
  return encodings;
}

namespace {

// Bytes that a byte-level token stands for; an added token stands for its own spelling.
std::string token_bytes(const std::string& token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const int byte = char_to_byte(utf8_next(token, at));
    if (byte < 0) return token;
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

}  // namespace

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::string bytes, text;
  for (int32_t id : ids) {
    PITH_CHECK(id >= 0 && id < vocab_size(), "token id {} is outside the vocabulary of {}", id,
               vocab_size());
    if (!(skip_special_tokens && is_special(id))) bytes += token_bytes(state_->tokens[id]);
  }
  utf8_replace_invalid(bytes, text);
  return text;
}

int64_t Tokenizer::vocab_size() const { return state_->tokens.size(); }
std::string Tokenizer::token(int32_t id) const {
  return id >= 0 && id < vocab_size() ? state_->tokens[id] : std::string();
}
std::optional<int32_t> Tokenizer::id(std::string_view token) const {
  const auto found = state_->ids.find(std::string(token));
  return found == state_->ids.end() ? std::nullopt : std::optional(found->second);
}
bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && state_->special[id];
}
std::optional<int32_t> Tokenizer::bos_id() const { return std::nullopt; }
std::optional<int32_t> Tokenizer::eos_id() const { return state_->eos; }
std::optional<int32_t> Tokenizer::pad_id() const { return std::nullopt; }
const std::string& Tokenizer::chat_template() const { return state_->chat_template; }
uint64_t Tokenizer::hash() const { return XXH3_64bits(state_->json.data(), state_->json.size()); }

StreamingDecoder::StreamingDecoder(Tokenizer tokenizer, bool skip_special_tokens)
    : tokenizer_(std::move(tokenizer)), skip_special_tokens_(skip_special_tokens) {}

std::string StreamingDecoder::push(int32_t id) {
  PITH_CHECK(id >= 0 && id < tokenizer_.vocab_size(),
             "token id {} is outside the vocabulary of {}", id, tokenizer_.vocab_size());
  if (skip_special_tokens_ && tokenizer_.is_special(id)) return "";
  held_ += token_bytes(tokenizer_.state_->tokens[id]);
  size_t at = 0;
  bool truncated = false;
  while (at < held_.size()) {
    const int length = utf8_sequence(held_, at, &truncated);
    if (truncated) break;
    at += std::abs(length);
  }
  std::string text;
  utf8_replace_invalid(std::string_view(held_).substr(0, at), text);
  held_.erase(0, at);
  return text;
}

std::string StreamingDecoder::finish() {
  std::string text;
  utf8_replace_invalid(held_, text);
  held_.clear();
  return text;
}

}  // namespace pith
