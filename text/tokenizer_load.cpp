// tokenizer.json and tokenizer_config.json. What is not supported and would change ids is refused
// by name.
#include <xxhash.h>
#include <nlohmann/json.hpp>
#include "text/tokenizer_state.h"
#include "text/unicode_tables.h"

namespace pith {
namespace {
using Json = nlohmann::json;

string read_file(const fs::path& path, bool optional = false) {
  if (optional && !fs::exists(path)) return "";
  ifstream file(path, std::ios::binary);
  string content{std::istreambuf_iterator<char>(file), {}};
  PITH_CHECK(file.is_open() && !file.bad(), "cannot read {}", path);
  return content;
}

Json parse_object(const string& text, string_view name) {
  Json json = Json::parse(text, nullptr, false);
  PITH_CHECK(json.is_object(), "{} is not a JSON object", name);
  return json;
}

const Json& member(const Json& object, const char* key) {
  static const Json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

// `otherwise` stands for a member that is missing or null.
template <class T> T get(const Json& object, const char* key, optional<T> otherwise = nullopt) {
  const Json& value = member(object, key);
  if (value.is_null() && otherwise) return *otherwise;
  const Json kind = T{};
  PITH_CHECK(value.type() == kind.type(), "tokenizer.json: {} is {}, not a {}", key,
    value.dump().substr(0, 80), kind.type_name());
  return value.get<T>();
}
string text_of(const Json& object, const char* key) { return get<string>(object, key); }
bool flag(const Json& object, const char* key, bool otherwise = false) {
  return get<bool>(object, key, otherwise);
}
string filled(const Json& object, const char* key) {
  string text = text_of(object, key);
  PITH_CHECK(!text.empty(), "tokenizer.json: {} is empty in {}", key, object.dump());
  return text;
}

int32_t id_of(const Json& value) {
  PITH_CHECK(value.is_number_integer() && value >= 0 && value < (1 << 28),
    "tokenizer.json: {} is not a token id", value.dump());
  return value.get<int32_t>();
}

[[noreturn]] void refuse(string_view kind, string_view name) {
  PITH_FAIL_HINT(
    "this program reads BPE tokenizers", "tokenizer.json: the {} {} is not supported", kind, name);
}

// The place of a name among those that are known.
int choose(const char* kind, string_view name, initializer_list<string_view> known) {
  const auto found = ranges::find(known, name);
  if (found == known.end()) refuse(kind, name);
  return int(found - known.begin());
}

// A component, the parts of a Sequence of them, or none.
vector<Json> components(const Json& json, const char* list, int depth = 0) {
  if (json.is_null()) return {};
  PITH_CHECK(depth < 16, "tokenizer.json: Sequences are nested too deep");
  if (text_of(json, "type") != "Sequence") return vector<Json>(1, json);
  const Json& parts = member(json, list);
  PITH_CHECK(parts.is_array(), "tokenizer.json: Sequence without {}", list);
  vector<Json> all;
  for (const Json& part: parts) ranges::move(components(part, list, depth + 1), back_inserter(all));
  return all;
}

Regex pattern_of(const Json& json) {
  const Json& pattern = member(json, "pattern");
  if (pattern.is_object() && pattern.contains("Regex")) return Regex(text_of(pattern, "Regex"));
  return Regex::literal(filled(pattern, "String"));
}

SplitBehavior behavior_of(const string& name) {
  return static_cast<SplitBehavior>(choose("split behavior", name,
    {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"}));
}

Replace replace_of(const Json& json) { return {pattern_of(json), text_of(json, "content")}; }

// "always", "first" or "never".
string scheme_of(const Json& json) {
  const auto scheme = get<string>(json, "prepend_scheme", "always");
  choose("Metaspace prepend_scheme", scheme, {"always", "first", "never"});
  return flag(json, "add_prefix_space", true) ? scheme : "never";
}

Stage make_normalizer(const Json& json) {
  const string type = text_of(json, "type");
  if (type == "Lowercase") return Lowercase{};
  if (type == "Prepend") return Prepend{text_of(json, "prepend")};
  if (type == "Replace") return replace_of(json);
  const int form = choose("normalizer", type, {"NFC", "NFD", "NFKC", "NFKD"});
  return NormalForm{form % 2 == 0, form >= 2};
}

constexpr string_view kGpt2Pattern =
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

void read_pre_tokenizer(const Json& json, Tokenizer::State& state) {
  using enum SplitBehavior;
  auto add = [&](Stage stage) { state.pre_tokenizers.push_back(std::move(stage)); };
  PITH_CHECK(!state.byte_level, "tokenizer.json: a pre_tokenizer after ByteLevel is not supported");
  const string type = text_of(json, "type");
  if (type == "Split") {
    const SplitBehavior behavior = behavior_of(text_of(json, "behavior"));
    add(Split{pattern_of(json), behavior, flag(json, "invert")});
  } else if (type == "ByteLevel") {
    state.byte_level = true;
    if (flag(json, "add_prefix_space", true)) add(Prepend{" ", true});
    if (flag(json, "use_regex", true)) add(Split{Regex(kGpt2Pattern), kIsolated});
  } else if (type == "Digits") {
    add(Split{Regex(kDigitPattern), flag(json, "individual_digits") ? kIsolated : kContiguous});
  } else if (type == "Punctuation") {
    add(Split{Regex(kPunctuationPattern, Regex::Syntax::kPcre2),
      behavior_of(get<string>(json, "behavior", "Isolated"))});
  } else if (type == "Whitespace") { // words, and runs of anything else but space
    add(Split{Regex(fmt::format("[{0}]+|[^\\s{0}]+", kWordMembers)), kRemoved, true});
  } else if (type == "WhitespaceSplit") {
    add(Split{Regex("\\s"), kRemoved});
  } else if (type == "Metaspace") {
    const string space = filled(json, "replacement"), scheme = scheme_of(json);
    add(Replace{Regex::literal(" "), space});
    if (scheme != "never") add(Prepend{space, true, scheme == "first"});
    if (flag(json, "split", true)) add(Split{Regex::literal(space), kMergedWithNext});
    state.needs_places = state.needs_places || (scheme == "first" && !state.normalizers.empty());
  } else {
    refuse("pre_tokenizer", type);
  }
}

Decoder make_decoder(const Json& json) {
  const string type = text_of(json, "type");
  if (type == "ByteLevel") return DecodeByteLevel{};
  if (type == "ByteFallback") return DecodeByteFallback{};
  if (type == "Fuse") return DecodeFuse{};
  if (type == "Replace") return DecodeReplace{replace_of(json)};
  if (type == "Metaspace")
    return DecodeReplace{
      {Regex::literal(filled(json, "replacement")), " "}, scheme_of(json) != "never"};
  if (type != "Strip") refuse("decoder", type);
  const string content = filled(json, "content");
  size_t at = 0; // its first character is taken off both ends, so often at most
  const auto code = uint32_t(utf8_next(content, at));
  const string ends = fmt::format(R"(\A\x{{{0:x}}}{{0,{1}}}(?!\A)|\x{{{0:x}}}{{0,{2}}}\z)", code,
    get<size_t>(json, "start"), get<size_t>(json, "stop"));
  return DecodeReplace{{Regex(ends, Regex::Syntax::kPcre2), ""}};
}

void read_post_processor(const Json& json, Tokenizer::State& state) {
  const string type = text_of(json, "type");
  if (type == "ByteLevel") {
    state.trim_offsets = state.trim_offsets || flag(json, "trim_offsets", true);
    state.trim_keeps_prefix_space = flag(json, "add_prefix_space", true);
    return;
  }
  if (type != "TemplateProcessing") refuse("post_processor", type);
  vector<int32_t> before, after;
  bool seen = false;
  for (const Json& piece: member(json, "single")) {
    if (const Json& sequence = member(piece, "Sequence"); !sequence.is_null()) {
      PITH_CHECK(!seen && text_of(sequence, "id") == "A",
        "tokenizer.json: TemplateProcessing must name the sequence A once");
      seen = true;
      continue;
    }
    const string name = text_of(member(piece, "SpecialToken"), "id");
    const Json& ids = member(member(member(json, "special_tokens"), name.c_str()), "ids");
    PITH_CHECK(ids.is_array(), "tokenizer.json: TemplateProcessing names {} without ids", name);
    for (const Json& json_id: ids) {
      const int32_t id = (seen ? after : before).emplace_back(id_of(json_id));
      PITH_CHECK(id < ssize(state.tokens), "tokenizer.json: no token {}", id);
    }
  }
  PITH_CHECK(seen, "tokenizer.json: TemplateProcessing has no sequence");
  state.prefix.insert(state.prefix.begin(), before.begin(), before.end());
  state.suffix.insert(state.suffix.end(), after.begin(), after.end());
}

void read_vocabulary(const Json& file, Tokenizer::State& state) {
  const Json& vocab = member(member(file, "model"), "vocab");
  PITH_CHECK(vocab.is_object(), "tokenizer.json: the model has no vocab");
  const Json& added = member(file, "added_tokens");
  const size_t limit = 16 * (vocab.size() + added.size()) + 65536; // a small file stays small
  auto put = [&](const string& token, int32_t id) {
    const size_t at = index(id);
    PITH_CHECK(at < limit, "tokenizer.json: id {} of token {} is out of proportion", id, token);
    if (state.tokens.size() <= at) state.tokens.resize(at + 1);
    string& place = state.tokens[at];
    PITH_CHECK(
      (place.empty() || place == token) && state.ids.try_emplace(token, id).first->second == id,
      "tokenizer.json: token {} with id {}: one of them stands for another, too", token, id);
    place = token;
  };
  for (const auto& [token, id]: vocab.items()) put(token, id_of(id));
  for (const Json& json: added) {
    AddedToken token{filled(json, "content"), id_of(member(json, "id")), flag(json, "special"),
      flag(json, "normalized", true), flag(json, "lstrip"), flag(json, "rstrip"),
      flag(json, "single_word")};
    put(token.content, token.id);
    state.added[token.id] = token;
  }
}

// The halves of a merge: "a b", or ["a", "b"].
pair<string, string> halves_of(const Json& merge) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
    return {merge[0].get<string>(), merge[1].get<string>()};
  const string text = merge.is_string() ? merge.get<string>() : "";
  const size_t space = text.find(' ');
  PITH_CHECK(space != text.npos && space == text.rfind(' '),
    "tokenizer.json: merge {} is not a pair", merge.dump());
  return {text.substr(0, space), text.substr(space + 1)};
}

void read_model(Json& file, Tokenizer::State& state) {
  Json& model = file["model"];
  choose("model", get<string>(model, "type", "BPE"), {"BPE"});
  for (const char* key: {"dropout", "end_of_word_suffix"}) {
    const Json& value = member(model, key);
    PITH_CHECK(value.is_null() || value == 0.0 || value == "",
      "tokenizer.json: {} {} is not supported", key, value.dump());
  }
  vector<string> tokens(state.tokens.size());
  for (const auto& [token, id]: model["vocab"].items()) tokens[id.get<size_t>()] = token;
  Bpe::Config config{.byte_level = state.byte_level,
    .ignore_merges = flag(model, "ignore_merges"),
    .byte_fallback = flag(model, "byte_fallback"),
    .fuse_unk = flag(model, "fuse_unk"),
    .prefix = get<string>(model, "continuing_subword_prefix", "")};
  auto id = [&](const string& token) {
    const auto found = state.find(token);
    PITH_CHECK(found && !tokens[index(*found)].empty(),
      "tokenizer.json: {} is not in the model's vocabulary", token);
    return *found;
  };
  if (!member(model, "unk_token").is_null()) config.unk_id = id(text_of(model, "unk_token"));

  const Json& merges = member(model, "merges");
  PITH_CHECK(merges.is_array(), "tokenizer.json: the model has no merges");
  vector<BpeMerge> list;
  list.reserve(merges.size());
  for (const Json& merge: merges) {
    const auto [left, right] = halves_of(merge);
    const int32_t left_id = id(left), right_id = id(right);
    const size_t cut = config.prefix.size();
    PITH_CHECK(right.size() >= cut, "tokenizer.json: merge {} lacks the prefix", merge.dump());
    list.push_back({left_id, right_id, id(left + right.substr(cut)), uint32_t(list.size())});
  }
  model.erase("vocab");
  model.erase("merges");
  string content = file.dump();
  for (const string& token: tokens) content.append(token.c_str(), token.size() + 1);
  content.append(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(BpeMerge));
  state.hash = XXH3_64bits(content.data(), content.size());
  state.bpe = Bpe(tokens, list, std::move(config));
}

void read_config(const string& text, Tokenizer::State& state) {
  const Json config = parse_object(text, "tokenizer_config.json");
  auto special = [&](const char* key) -> optional<int32_t> {
    const Json& value = member(config, key);
    const Json& content = value.is_object() ? member(value, "content") : value;
    if (content.is_null()) return nullopt;
    PITH_CHECK(content.is_string(), "tokenizer_config.json: {} is not a text", key);
    const auto found = state.find(content.get<string>());
    PITH_CHECK(found, "tokenizer_config.json: {} {} is not in the vocabulary", key, content.dump());
    return found;
  };
  state.bos = special("bos_token");
  state.eos = special("eos_token");
  state.pad = special("pad_token");
  const Json& chat = member(config, "chat_template");
  if (chat.is_string()) state.chat_template = chat.get<string>();
  for (const Json& named: chat) // several by name
    if (member(named, "name") == "default") state.chat_template = text_of(named, "template");
}

shared_ptr<const Tokenizer::State> make_state(string json, string config, string chat_template) {
  auto state = make_shared<Tokenizer::State>();
  Json file = parse_object(json, "tokenizer.json");
  for (const char* key: {"truncation", "padding"})
    PITH_CHECK(member(file, key).is_null(), "tokenizer.json: {} is not supported", key);

  for (const Json& part: components(member(file, "normalizer"), "normalizers"))
    state->normalizers.push_back(make_normalizer(part));
  for (const Json& part: components(member(file, "pre_tokenizer"), "pretokenizers"))
    read_pre_tokenizer(part, *state);
  read_vocabulary(file, *state);
  for (const Json& part: components(member(file, "post_processor"), "processors"))
    read_post_processor(part, *state);
  state->no_decoder = member(file, "decoder").is_null();
  for (const Json& part: components(member(file, "decoder"), "decoders"))
    state->decoders.push_back(make_decoder(part));
  read_model(file, *state);

  for (const auto& [id, token]: state->added) {
    std::list<Rewriter> storage;
    if (token.normalized)
      state->normalized_added.add(state->normalize({token.content}, false, storage).text, &token);
    else state->raw_added.add(token.content, &token);
  }
  if (!config.empty()) read_config(config, *state);
  if (!chat_template.empty()) state->chat_template = chat_template;
  state->json = std::move(json);
  state->config = std::move(config);
  state->chat_template_file = std::move(chat_template);
  return state;
}
}

string byte_level_json(const vector<string>& vocabulary,
  const vector<pair<int32_t, int32_t>>& merges, string_view pattern,
  const vector<pair<string, int32_t>>& special) {
  Json file = Json::parse(R"({"version": "1.0", "truncation": null, "padding": null,
      "normalizer": null, "added_tokens": [],
      "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
                "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "byte_fallback": false, "ignore_merges": false, "vocab": {}, "merges": []}})");
  const Json byte_level = Json::parse(R"({"type": "ByteLevel", "add_prefix_space": false,
      "trim_offsets": false, "use_regex": false})");
  for (const char* key: {"pre_tokenizer", "post_processor", "decoder"}) file[key] = byte_level;
  if (!pattern.empty()) {
    const Json split = {{"type", "Split"}, {"pattern", {{"Regex", pattern}}},
      {"behavior", "Isolated"}, {"invert", false}};
    file["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}};
  }
  Json& model = file["model"];
  for (size_t id = 0; id < vocabulary.size(); ++id) model["vocab"][vocabulary[id]] = id;
  const auto token = [&](int32_t id) { return vocabulary[index(id)]; };
  for (const auto& [left, right]: merges) model["merges"].push_back({token(left), token(right)});
  for (const auto& [content, id]: special) {
    Json& added = file["added_tokens"].emplace_back(Json::parse(R"({"single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true})"));
    added["id"] = id;
    added["content"] = content;
  }
  return file.dump(1) + "\n";
}

string tokenizer_config_json(string_view end_of_text) {
  const Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"eos_token", end_of_text},
    {"clean_up_tokenization_spaces", false}};
  return config.dump(1) + "\n";
}

Tokenizer Tokenizer::from_json(string tokenizer_json, string tokenizer_config) {
  return Tokenizer(make_state(std::move(tokenizer_json), std::move(tokenizer_config), ""));
}

Tokenizer Tokenizer::bytes() {
  vector<string> vocabulary;
  for (int byte = 0; byte < 256; ++byte) vocabulary.push_back(spell_bytes(string(1, char(byte))));
  return from_json(byte_level_json(vocabulary, {}, "", {{"<|endoftext|>", 256}}),
    tokenizer_config_json("<|endoftext|>"));
}

Tokenizer Tokenizer::load(const fs::path& path) {
  if (!fs::is_directory(path)) return from_json(read_file(path));
  return Tokenizer(
    make_state(read_file(path / "tokenizer.json"), read_file(path / "tokenizer_config.json", true),
      read_file(path / "chat_template.jinja", true)));
}

void Tokenizer::save(const fs::path& folder) const {
  fs::create_directories(folder);
  for (const auto& [name, content]:
    {pair("tokenizer.json", &state_->json), {"tokenizer_config.json", &state_->config},
      {"chat_template.jinja", &state_->chat_template_file}}) {
    if (content->empty()) continue;
    std::ofstream file(folder / name, std::ios::binary);
    PITH_CHECK(file << *content << std::flush, "cannot write {}", folder / name);
  }
}
}
