#include "engine/corpus.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <ranges>
#include <regex>
#include <set>
#include <system_error>

#include "engine/file_io.h"
#include "engine/hf_folder.h"

namespace pith {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr size_t kHeader = 9 + 8 + 1 + 8 + 8;
constexpr const char* kFormat = "pithtrain corpus";
constexpr uint64_t kBlock = 256 << 10;  // bytes of PREFIX.bin under one sum of the side file

// The arrays of an index follow a header of 34 bytes, so nothing in it is aligned.
template <class T>
T load(const char* array, int64_t i) {
  T value;
  std::memcpy(&value, array + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
void widen(const char* ids, std::span<int64_t> out) {
  for (size_t i = 0; i < out.size(); ++i) out[i] = load<T>(ids, static_cast<int64_t>(i));
}

template <class T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

struct IdType {
  int code;  // of the index format
  const char* name;
  int64_t width;
  void (*load)(const char* ids, std::span<int64_t> out);
};
constexpr IdType kIdTypes[] = {{1, "uint8", 1, widen<uint8_t>}, {2, "int8", 1, widen<int8_t>},
    {3, "int16", 2, widen<int16_t>}, {4, "int32", 4, widen<int32_t>},
    {5, "int64", 8, widen<int64_t>}, {8, "uint16", 2, widen<uint16_t>}};

const IdType& id_type(int code, const std::string& source) {
  for (const IdType& type : kIdTypes)
    if (type.code == code) return type;
  PITH_FAIL("{}: dtype code {} is not an integer type of this format", source, code);
}

// PREFIX.json, by its keys; a corpus of another program has none.
struct SideFile {
  std::string format = kFormat;
  int64_t version = 1, vocab_size = 0;
  std::string tokenizer_hash;
  int64_t documents = 0, tokens = 0;
  std::string index_xxh3;
  uint64_t block_bytes = kBlock;
  std::string block_xxh3;  // 16 hexadecimal digits a block

  bool present = false;
  uint64_t sum = 0;  // of the file itself
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SideFile, format, version, vocab_size, tokenizer_hash, documents,
    tokens, index_xxh3, block_bytes, block_xxh3)

SideFile read_side_file(const fs::path& path) {
  if (!fs::exists(path)) return {};
  const MappedFile file = map_file(path);
  const std::string source = path.string();
  const json document = parse_json(file.bytes(), source);
  if (!document.is_object() || document.value("format", json()) != kFormat)
    PITH_FAIL_HINT("another program's file: rename it to read the corpus without it",
        "{}: not the side file of a corpus", source);
  check_seal(file.bytes(), source);
  try {
    SideFile side = document;
    PITH_CHECK(side.version == 1, "{}: version {} is not known", source, side.version);
    side.present = true;
    side.sum = xxh3(file.bytes());
    return side;
  } catch (const json::exception& error) {
    PITH_FAIL("{}: {}", source, error.what());
  }
}

// Where a shard is written, and what it is called in the end: PREFIX-00003, PREFIX-00003-of-00007.
std::string base_name(const std::string& prefix, int64_t shard, bool sharded) {
  return sharded ? fmt::format("{}-{:05}", prefix, shard) : prefix;
}
std::string final_name(const std::string& prefix, int64_t shard, int64_t shards) {
  return shards > 0 ? fmt::format("{}-{:05}-of-{:05}", prefix, shard, shards) : prefix;
}

// Is `file` a file of the corpus `name`, finished or not, however it is cut?
bool belongs_to(const std::string& file, const std::string& name) {
  static const std::regex rest(
      R"((-\d{5,}-of-\d{5,})?\.(bin|idx|json)|(-\d{5,})?\.(bin|idx|json|len|sum)\.tmp)");
  return file.starts_with(name) && std::regex_match(file.substr(name.size()), rest);
}

// PREFIX itself, or its shards when there are any.
std::vector<std::string> shard_prefixes(const std::string& prefix) {
  const fs::path folder = fs::absolute(prefix).parent_path();
  if (fs::exists(prefix + ".idx") || fs::exists(prefix + ".bin") || !fs::is_directory(folder))
    return {prefix};
  static const std::regex rest(R"(-\d{5,}-of-(\d{5,9})\.idx)");
  const std::string name = fs::path(prefix).filename().string();
  std::set<int64_t> counts;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string file = entry.path().filename().string();
    const std::string ending = file.starts_with(name) ? file.substr(name.size()) : "";
    if (std::smatch match; std::regex_match(ending, match, rest))
      counts.insert(std::stoll(match[1]));
  }
  PITH_CHECK(counts.size() <= 1, "{}: shards of two corpora, of {} and of {}", prefix,
      *counts.begin(), *counts.rbegin());
  if (counts.empty()) return {prefix};
  std::vector<std::string> prefixes;
  for (int64_t shard = 0; shard < *counts.begin(); ++shard)
    prefixes.push_back(final_name(prefix, shard, *counts.begin()));
  return prefixes;
}

}  // namespace

int64_t CorpusIndex::begin(int64_t document) const {
  const int64_t sequence = load<int64_t>(documents, document);
  return sequence == num_sequences ? num_tokens : load<int64_t>(pointers, sequence) / width;
}

CorpusIndex parse_corpus_index(
    std::string_view bytes, uint64_t bin_bytes, const std::string& source) {
  PITH_CHECK(bytes.size() >= kHeader && bytes.substr(0, kMagic.size()) == kMagic,
      "{}: not the index of a corpus ({} bytes)", source, bytes.size());
  const char* data = bytes.data();
  const auto version = load<uint64_t>(data + 9, 0), sequences = load<uint64_t>(data + 18, 0),
             borders = load<uint64_t>(data + 26, 0);
  PITH_CHECK(version == 1, "{}: version {} is not known", source, version);
  CorpusIndex index;
  index.dtype_code = static_cast<uint8_t>(data[17]);
  index.width = id_type(index.dtype_code, source).width;
  const uint64_t body = bytes.size() - kHeader;
  PITH_CHECK(sequences <= body / 12 && borders <= body / 8 && 12 * sequences + 8 * borders == body,
      "{}: its bytes do not hold {} sequences, {} documents", source, sequences, borders);
  PITH_CHECK(borders >= 1, "{}: the list of documents is empty", source);
  index.num_sequences = static_cast<int64_t>(sequences);
  index.num_documents = static_cast<int64_t>(borders) - 1;
  index.lengths = data + kHeader;
  index.pointers = index.lengths + 4 * sequences;
  index.documents = index.pointers + 8 * sequences;

  PITH_CHECK(load<int64_t>(index.documents, 0) == 0 &&
                 load<int64_t>(index.documents, index.num_documents) == index.num_sequences,
      "{}: documents do not span all {} sequences", source, sequences);
  int64_t tokens = 0;  // cannot overflow: at most 2^31 for each 12 bytes of the index
  const auto held = static_cast<int64_t>(bin_bytes / static_cast<uint64_t>(index.width));
  for (int64_t d = 0, s = 0; d < index.num_documents; ++d) {
    const auto end = load<int64_t>(index.documents, d + 1);
    PITH_CHECK(s <= end && end <= index.num_sequences, "{}: document {} goes from {} to {} of {}",
        source, d, s, end, sequences);
    for (; s < end; ++s) {
      const auto length = load<int32_t>(index.lengths, s);
      PITH_CHECK(length >= 0 && load<int64_t>(index.pointers, s) == tokens * index.width,
          "{}: document {}: its tokens do not follow those before", source, d);
      tokens += length;
      if (tokens > held)
        PITH_FAIL_HINT("the .bin file is cut short: copy or build the corpus again",
            "{}: document {} ends at token {}, the .bin holds {}", source, d, tokens, held);
    }
  }
  PITH_CHECK(static_cast<uint64_t>(tokens * index.width) == bin_bytes,
      "{}: documents fill {} bytes, the .bin has {}", source, tokens * index.width, bin_bytes);
  index.num_tokens = tokens;
  return index;
}

struct Corpus::Shard {
  std::string prefix;
  MappedFile index_file, bin;
  CorpusIndex index;
  SideFile side;
  uint64_t index_sum = 0;

  explicit Shard(std::string path);
  // Index of the first id outside the vocabulary, or -1. Without a side file only negative ids are.
  int64_t first_invalid(std::span<const int64_t> ids) const {
    const int64_t limit = side.present ? side.vocab_size : std::numeric_limits<int64_t>::max();
    const auto bad =
        std::find_if(ids.begin(), ids.end(), [&](int64_t id) { return id < 0 || id >= limit; });
    return bad == ids.end() ? -1 : bad - ids.begin();
  }

  void load_ids(int64_t token, std::span<int64_t> out) const {
    id_type(index.dtype_code, prefix).load(bin.data.get() + token * index.width, out);
  }

  int64_t document_at(uint64_t byte) const {  // the last one that begins at or before it
    const auto documents = std::views::iota(int64_t{1}, std::max<int64_t>(1, index.num_documents));
    const auto after = std::ranges::partition_point(documents,
        [&](int64_t d) { return index.begin(d) * index.width <= static_cast<int64_t>(byte); });
    return *after - 1;
  }

  void verify(std::vector<std::string>& problems) const;
};

Corpus::Shard::Shard(std::string path) : prefix(std::move(path)) {
  for (const char* extension : {".idx", ".bin"})
    if (!fs::exists(prefix + extension))
      PITH_FAIL_HINT(
          "give the path without extension; `pithtrain corpus build --out PREFIX` makes one",
          "there is no corpus {0}: {0}{1} is missing", prefix, extension);
  side = read_side_file(prefix + ".json");
  index_file = map_file(prefix + ".idx");
  bin = map_file(prefix + ".bin");
  index_sum = xxh3(index_file.bytes());
  index = parse_corpus_index(index_file.bytes(), bin.size, prefix + ".idx");
  if (!side.present) return;
  PITH_CHECK(hex(index_sum) == side.index_xxh3,
      "{}.idx is damaged: its bytes do not match the sum in {}.json", prefix, prefix);
  PITH_CHECK(side.block_bytes > 0 && side.vocab_size > 0, "{}.json: no blocks or ids", prefix);
  const uint64_t blocks = bin.size / side.block_bytes + (bin.size % side.block_bytes > 0);
  PITH_CHECK(side.block_xxh3.size() == 16 * blocks,
      "{}.json does not belong to this .bin of {} bytes", prefix, bin.size);
}

void Corpus::Shard::verify(std::vector<std::string>& problems) const {
  for (size_t block = 0; block < side.block_xxh3.size() / 16; ++block) {
    const uint64_t begin = block * side.block_bytes;
    const std::string_view bytes = bin.bytes().substr(begin, side.block_bytes);
    if (hex(xxh3(bytes)) != std::string_view(side.block_xxh3).substr(16 * block, 16))
      problems.push_back(fmt::format(
          "{}.bin is damaged between bytes {} and {}: documents {} to {}", prefix, begin,
          begin + bytes.size(), document_at(begin), document_at(begin + bytes.size() - 1)));
  }
  std::vector<int64_t> ids;
  for (int64_t d = 0, bad = -1; d < index.num_documents; ++d, bad = -1) {
    constexpr int64_t kPart = 1 << 16;
    for (int64_t at = index.begin(d); at < index.begin(d + 1) && bad < 0; at += kPart) {
      ids.resize(static_cast<size_t>(std::min(index.begin(d + 1) - at, kPart)));
      load_ids(at, ids);
      bad = first_invalid(ids);
      if (bad >= 0)
        problems.push_back(
            fmt::format("{}.bin: document {}, token {}: id {} is outside the vocabulary", prefix, d,
                at + bad - index.begin(d), ids[static_cast<size_t>(bad)]));
    }
  }
}

struct Corpus::State {
  std::string prefix;
  std::vector<Shard> shards;
  std::vector<int64_t> begins;  // first document of each shard
  int64_t documents = 0, tokens = 0;
  // The shard that holds a document; `document` becomes its number there.
  const Shard& locate(int64_t& document) const {
    PITH_CHECK(document >= 0 && document < documents, "{}: there is no document {} among {}",
        prefix, document, documents);
    const auto after = std::upper_bound(begins.begin(), begins.end(), document);
    document -= *(after - 1);
    return shards[static_cast<size_t>(after - begins.begin() - 1)];
  }
};

Corpus::Corpus(const std::string& prefix) {
  auto state = std::make_shared<State>();
  state->prefix = prefix;
  for (const std::string& path : shard_prefixes(prefix)) {
    const Shard& shard = state->shards.emplace_back(path);
    const Shard& first = state->shards.front();
    PITH_CHECK(shard.index.dtype_code == first.index.dtype_code &&
                   shard.side.vocab_size == first.side.vocab_size &&
                   shard.side.tokenizer_hash == first.side.tokenizer_hash,
        "{} and {} are not shards of one corpus: ids or tokenizer differ", first.prefix,
        shard.prefix);
    state->begins.push_back(state->documents);
    state->documents += shard.index.num_documents;
    state->tokens += shard.index.num_tokens;
  }
  state_ = std::move(state);
}

int64_t Corpus::num_documents() const { return state_->documents; }
int64_t Corpus::num_tokens() const { return state_->tokens; }
int64_t Corpus::vocab_size() const { return state_->shards[0].side.vocab_size; }
std::string Corpus::tokenizer_hash() const { return state_->shards[0].side.tokenizer_hash; }
const std::string& Corpus::prefix() const { return state_->prefix; }

std::vector<std::string> Corpus::shards() const {
  std::vector<std::string> prefixes;
  for (const Shard& shard : state_->shards) prefixes.push_back(shard.prefix);
  return prefixes;
}

std::string Corpus::dtype() const {
  return id_type(state_->shards[0].index.dtype_code, state_->prefix).name;
}

int64_t Corpus::length(int64_t document) const {
  const Shard& shard = state_->locate(document);
  return shard.index.begin(document + 1) - shard.index.begin(document);
}

void Corpus::read(int64_t document, int64_t begin, std::span<int64_t> out) const {
  int64_t local = document;
  const Shard& shard = state_->locate(local);
  const auto count = static_cast<int64_t>(out.size());
  const int64_t first = shard.index.begin(local), size = shard.index.begin(local + 1) - first;
  PITH_CHECK(begin >= 0 && begin <= size && count <= size - begin,
      "{}: document {} has {} tokens, not those from {} to {}", prefix(), document, size, begin,
      begin + count);
  shard.load_ids(first + begin, out);
  if (const int64_t bad = shard.first_invalid(out); bad >= 0)
    PITH_FAIL_HINT("`pithtrain corpus verify` tells what is damaged",
        "{}: document {}, token {}: id {} is outside the vocabulary of {}", prefix(), document,
        begin + bad, out[static_cast<size_t>(bad)], vocab_size());
}

std::string Corpus::fingerprint() const {
  std::string all;
  for (const Shard& shard : state_->shards)
    all += fmt::format("{}{} {} {}", all.empty() ? "" : " ", hex(shard.index_sum), shard.bin.size,
        hex(shard.side.sum));
  return hex(xxh3(all));
}

std::vector<std::string> verify_corpus(const std::string& prefix) {
  std::vector<std::string> problems;
  try {
    const Corpus corpus(prefix);
    for (const Corpus::Shard& shard : corpus.state_->shards) shard.verify(problems);
  } catch (const Error& error) {
    problems.push_back(error.message());
  }
  return problems;
}

// The open shard is three files that only grow: BASE.bin.tmp, BASE.len.tmp (an int32 a document)
// and BASE.sum.tmp (the sums of the full blocks). Its index and side file are made when it is full.
struct CorpusWriter::State {
  std::string prefix, tokenizer_hash;
  int64_t vocab_size = 0, width = 0, shard_tokens = 0;
  CorpusProgress at;
  std::optional<OutputFile> bin, lengths, sums;
  std::string block;   // the last block of the .bin, not full yet
  size_t written = 0;  // bytes of it that are in the file already
  bool closed = false, wanted = false;

  ~State() {
    if (!wanted) remove_files();
  }

  std::string base() const { return base_name(prefix, at.shard, shard_tokens > 0); }

  void remove_files() {
    std::error_code ignored;
    for (at.shard = shard_tokens > 0 ? at.shard : 0; at.shard >= 0; --at.shard)
      for (const char* kind : {".bin", ".idx", ".json", ".len", ".sum"})
        fs::remove(base() + kind + ".tmp", ignored);
    wanted = true;
  }

  void open_shard() {
    const auto bytes = static_cast<uint64_t>(at.tokens * width);
    bin.emplace(base() + ".bin.tmp", bytes);
    lengths.emplace(base() + ".len.tmp", static_cast<uint64_t>(at.documents) * sizeof(int32_t));
    sums.emplace(base() + ".sum.tmp", bytes / kBlock * 16);
    const uint64_t rest = bytes % kBlock;
    block = rest == 0 ? "" : map_file(base() + ".bin.tmp").bytes().substr(bytes - rest, rest);
    written = block.size();
  }

  void write_block() {
    bin->append(std::string_view(block).substr(written));
    written = block.size();
  }

  void end_block() {
    if (block.empty()) return;
    write_block();
    sums->append(hex(xxh3(block)));
    block.clear();
    written = 0;
  }

  void append(std::span<const int32_t> ids) {
    for (const int32_t id : ids) {  // little-endian: its first bytes are the narrower id
      block.append(reinterpret_cast<const char*>(&id), static_cast<size_t>(width));
      if (block.size() == kBlock) end_block();
    }
  }

  void close_shard() {
    end_block();
    for (auto* file : {&bin, &lengths, &sums}) (*file)->close();
    const json side = SideFile{.vocab_size = vocab_size,
        .tokenizer_hash = tokenizer_hash,
        .documents = at.documents,
        .tokens = at.tokens,
        .index_xxh3 = hex(write_index()),
        .block_xxh3 = read_file(base() + ".sum.tmp")};
    write_file("", base() + ".json.tmp", seal_json(side.dump(1)));
  }

  uint64_t write_index() const {
    const MappedFile mapped = map_file(base() + ".len.tmp");
    OutputFile out(base() + ".idx.tmp");
    const auto count = static_cast<uint64_t>(at.documents);
    out.append(std::string(kMagic) + raw(uint64_t{1}) + raw(uint8_t(width == 2 ? 8 : 4)) +
               raw(count) + raw(count + 1));
    out.append(mapped.bytes());
    int64_t pointer = 0;
    for (int64_t d = 0; d < at.documents; ++d) {
      out.append(raw(pointer));
      pointer += load<int32_t>(mapped.data.get(), d) * width;
    }
    for (int64_t d = 0; d <= at.documents; ++d) out.append(raw(d));
    return out.close();
  }
};

CorpusWriter::CorpusWriter(std::string prefix, int64_t vocab_size, std::string tokenizer_hash,
    int64_t shard_tokens, const CorpusProgress* resume) {
  PITH_CHECK(vocab_size > 0 && vocab_size <= int64_t{1} << 31, "{}: a vocabulary of {} ids", prefix,
      vocab_size);
  PITH_CHECK(fs::path(prefix).has_filename(), "{} names a folder, not files in it", prefix);
  fs::create_directories(fs::absolute(prefix).parent_path());
  state_ = std::make_shared<State>();
  state_->prefix = std::move(prefix);
  state_->tokenizer_hash = std::move(tokenizer_hash);
  state_->vocab_size = vocab_size;
  state_->width = vocab_size <= 65536 ? 2 : 4;
  state_->shard_tokens = shard_tokens;
  state_->wanted = resume != nullptr;
  if (resume) state_->at = *resume;
  state_->open_shard();
}

void CorpusWriter::add_document(std::span<const int32_t> ids) {
  State& state = *state_;
  const auto size = static_cast<int64_t>(ids.size());
  PITH_CHECK(!state.closed, "corpus {} is finished already", state.prefix);
  for (size_t i = 0; i < ids.size(); ++i)
    PITH_CHECK(ids[i] >= 0 && ids[i] < state.vocab_size,
        "{}: document {}, token {}: id {} is outside the vocabulary of {}", state.prefix,
        state.at.documents, i, ids[i], state.vocab_size);
  PITH_CHECK(size <= INT32_MAX, "corpus {}: document {} has {} tokens, too many for the format",
      state.prefix, state.at.documents, size);
  if (state.shard_tokens > 0 && state.at.documents > 0 &&
      state.at.tokens + size > state.shard_tokens) {
    state.close_shard();
    state.at = {state.at.shard + 1};
    state.open_shard();
  }
  state.append(ids);
  state.lengths->append(raw(static_cast<int32_t>(size)));
  ++state.at.documents;
  state.at.tokens += size;
}

CorpusProgress CorpusWriter::sync() {
  state_->write_block();
  for (auto* file : {&state_->bin, &state_->lengths, &state_->sums}) (*file)->sync();
  sync_folder(fs::absolute(state_->prefix).parent_path());
  state_->wanted = true;
  return state_->at;
}

int64_t CorpusWriter::close() {
  PITH_CHECK(!state_->closed, "corpus {} is finished already", state_->prefix);
  state_->close_shard();
  sync_folder(fs::absolute(state_->prefix).parent_path());
  state_->closed = true;
  return state_->shard_tokens > 0 ? state_->at.shard + 1 : 0;
}

void CorpusWriter::finish() {
  const int64_t shards = close();
  state_->wanted = true;
  publish_corpus(state_->prefix, shards);
}

void CorpusWriter::discard() { state_->remove_files(); }

void publish_corpus(const std::string& prefix, int64_t shards) {
  std::set<fs::path> kept;
  const fs::path folder = fs::absolute(prefix).parent_path();
  try {
    // Without .idx there is no corpus: the old ones go first, the new ones come last.
    for (const auto& [ending, old] : {std::pair{".idx", true}, std::pair{".bin", false},
             std::pair{".json", false}, std::pair{".idx", false}})
      for (int64_t shard = 0; shard < std::max<int64_t>(1, shards); ++shard) {
        const fs::path from = base_name(prefix, shard, shards > 0) + ending + ".tmp";
        const fs::path to = final_name(prefix, shard, shards) + ending;
        kept.insert(to.filename());
        if (!fs::exists(from)) continue;  // done before an interruption
        if (old)
          fs::remove(to);
        else
          fs::rename(from, to);
      }
    sync_folder(folder);
    // What is left of an older corpus that was cut otherwise, and of the writing.
    for (const auto& entry : fs::directory_iterator(folder))
      if (belongs_to(entry.path().filename().string(), fs::path(prefix).filename().string()) &&
          !kept.contains(entry.path().filename()))
        fs::remove(entry.path());
  } catch (const fs::filesystem_error& error) {
    PITH_FAIL("cannot finish corpus {}: {}", prefix, error.what());
  }
}

}  // namespace pith
