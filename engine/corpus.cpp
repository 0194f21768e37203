#include "engine/corpus.h"
#include <nlohmann/json.hpp>

namespace pith {
namespace {
using nlohmann::json;

constexpr string_view kMagic("MMIDIDX\0\0", 9);
constexpr size_t kHeader = 9 + 8 + 1 + 8 + 8; // of the index: nothing behind it is aligned
constexpr const char* kFormat = "pithtrain corpus";
constexpr uint64_t kBlock = 256 << 10; // bytes of PREFIX.bin under one sum of the side file

// PREFIX.json.
struct SideFile {
  string format = kFormat;
  int64_t version = 1, vocab_size = 0;
  string tokenizer_hash;
  int64_t documents = 0, tokens = 0;
  string index_xxh3;
  uint64_t block_bytes = kBlock;
  string block_xxh3 = {}; // 16 hexadecimal digits a block
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SideFile, format, version, vocab_size, tokenizer_hash, documents,
  tokens, index_xxh3, block_bytes, block_xxh3)

// Nothing for a corpus of another program.
optional<SideFile> read_side_file(const string& path) {
  if (!fs::exists(path)) return {};
  const string text = read_file(path);
  const json document = parse_json(text, path);
  if (!document.is_object() || document.value("format", json()) != kFormat)
    PITH_FAIL_HINT("another program's file: rename it to read the corpus without it",
      "{}: not the side file of a corpus", path);
  check_seal(text, path);
  try {
    PITH_CHECK(document.at("version") == 1, "{}: version {} is not known", path,
      document.at("version").dump());
    return document.get<SideFile>();
  } catch (const json::exception& error) { PITH_FAIL("{}: {}", path, error); }
}

// Where a shard is written, and its name in the end: PREFIX-00003, PREFIX-00003-of-00007.
string working_name(const string& prefix, int64_t shard, bool cut) {
  return cut ? fmt::format("{}-{:05}", prefix, shard) : prefix;
}
string final_name(const string& prefix, int64_t shard, int64_t shards) {
  return shards > 0 ? fmt::format("{}-{:05}-of-{:05}", prefix, shard, shards) : prefix;
}
}

CorpusIndex parse_corpus_index(string_view bytes, uint64_t bin_bytes, const string& source) {
  PITH_CHECK(bytes.size() >= kHeader && bytes.substr(0, kMagic.size()) == kMagic,
    "{}: not the index of a corpus ({} bytes)", source, bytes.size());
  const char* data = bytes.data();
  const auto version = load<uint64_t>(data + 9), sequences = load<uint64_t>(data + 18),
             borders = load<uint64_t>(data + 26);
  PITH_CHECK(version == 1, "{}: version {} is not known", source, version);
  CorpusIndex index;
  const int dtype = data[17];
  PITH_CHECK(dtype == 4 || dtype == 8, "{}: dtype code {} is neither int32, 4, nor uint16, 8",
    source, dtype);
  index.width = dtype == 8 ? 2 : 4;
  const uint64_t body = bytes.size() - kHeader;
  PITH_CHECK(sequences <= body / 12 && borders <= body / 8 && 12 * sequences + 8 * borders == body,
    "{}: {} bytes do not hold {} sequences and {} documents", source, bytes.size(), sequences,
    borders);
  PITH_CHECK(borders >= 1, "{}: the list of documents is empty", source);
  index.num_sequences = int64_t(sequences);
  index.num_documents = int64_t(borders) - 1;
  index.lengths = data + kHeader;
  index.pointers = index.lengths + 4 * sequences;
  index.documents = index.pointers + 8 * sequences;

  PITH_CHECK(load<int64_t>(index.documents, 0) == 0 &&
      load<int64_t>(index.documents, index.num_documents) == index.num_sequences,
    "{}: documents do not span all {} sequences", source, sequences);
  int64_t tokens = 0; // cannot overflow: at most 2^31 for each 12 bytes of the index
  const auto held = int64_t(bin_bytes / uint64_t(index.width));
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
  PITH_CHECK(uint64_t(tokens * index.width) == bin_bytes,
    "{}: the documents fill {} bytes, the .bin has {}", source, tokens * index.width, bin_bytes);
  index.num_tokens = tokens;
  return index;
}

vector<string> corpus_shards(const string& prefix) {
  if (fs::exists(prefix + ".idx") || fs::exists(prefix + ".bin")) return {prefix};
  const fs::path folder = fs::absolute(prefix).parent_path();
  const string first = fs::path(prefix).filename().string() + "-00000-of-";
  int64_t count = 0;
  for (const string& name: names_in(folder)) {
    int64_t shards = 0;
    if (!name.starts_with(first) || !name.ends_with(".idx") ||
      from_chars(name.data() + first.size(), name.data() + name.size(), shards).ec != std::errc())
      continue;
    PITH_CHECK(count == 0, "{}: shards of two corpora, of {} and of {}", prefix, count, shards);
    count = shards;
  }
  vector<string> prefixes;
  for (int64_t shard = 0; shard < count; ++shard)
    prefixes.push_back(final_name(prefix, shard, count));
  return prefixes;
}

Corpus::Shard::Shard(string path) : prefix(std::move(path)) {
  for (const char* extension: {".idx", ".bin"})
    if (!fs::exists(prefix + extension))
      PITH_FAIL_HINT(
        "give the path without extension; `pithtrain corpus build --out PREFIX` makes one",
        "there is no corpus {0}: {0}{1} is missing", prefix, extension);
  const auto side = read_side_file(prefix + ".json");
  index_file = map_file(prefix + ".idx");
  bin = map_file(prefix + ".bin");
  const string index_sum = xxh3(index_file.bytes());
  index = parse_corpus_index(index_file.bytes(), bin.size, prefix + ".idx");
  if (side) {
    PITH_CHECK(index_sum == side->index_xxh3,
      "{}.idx is damaged: its bytes do not match the sum in {}.json", prefix, prefix);
    PITH_CHECK(side->block_bytes > 0 && side->vocab_size > 0 &&
        side->block_xxh3.size() == 16 * ((bin.size + side->block_bytes - 1) / side->block_bytes),
      "{}.json does not belong to this {}.bin of {} bytes", prefix, prefix, bin.size);
    vocab_size = side->vocab_size;
    tokenizer_hash = side->tokenizer_hash;
  }
  facts = fmt::format(
    "{} {} {}", index_sum, bin.size, side ? xxh3(map_file(prefix + ".json").bytes()) : hex(0));
}

void Corpus::Shard::verify(vector<string>& problems) const {
  const SideFile side = read_side_file(prefix + ".json").value_or(SideFile{});
  int64_t document = 0;
  const auto document_at = [&](uint64_t byte) { // the last one that begins at or before it
    const auto token = int64_t(byte) / index.width;
    while (document + 1 < index.num_documents && index.begin(document + 1) <= token) ++document;
    return document;
  };
  for (size_t block = 0; block < side.block_xxh3.size() / 16; ++block) {
    const uint64_t begin = block * side.block_bytes;
    const string_view bytes = bin.bytes().substr(begin, side.block_bytes);
    if (side.block_xxh3.compare(16 * block, 16, xxh3(bytes)) == 0) continue;
    const int64_t first = document_at(begin);
    problems.push_back(fmt::format("{}.bin is damaged between bytes {} and {}: documents {} to {}",
      prefix, begin, begin + bytes.size(), first, document_at(begin + bytes.size() - 1)));
  }
}

Corpus::Corpus(const string& prefix) : prefix_(prefix), begins_{0} {
  vector<string> paths = corpus_shards(prefix);
  if (paths.empty()) paths = {prefix}; // whose opening says what is missing
  for (const string& path: paths) {
    const Shard& shard = shards_.emplace_back(path);
    PITH_CHECK(shard.index.width == shards_[0].index.width && shard.vocab_size == vocab_size() &&
        shard.tokenizer_hash == tokenizer_hash(),
      "{} and {} are not shards of one corpus: ids or tokenizer differ", paths[0], path);
    begins_.push_back(begins_.back() + shard.index.num_documents);
    num_tokens_ += shard.index.num_tokens;
  }
}

string Corpus::fingerprint() const {
  string facts;
  for (const Shard& shard: shards_) facts += (facts.empty() ? "" : " ") + shard.facts;
  return xxh3(facts);
}

const Corpus::Shard& Corpus::locate(int64_t& document) const {
  PITH_CHECK(document >= 0 && document < num_documents(), "{}: there is no document {} among {}",
    prefix_, document, num_documents());
  const auto after = ranges::upper_bound(begins_, document);
  document -= *(after - 1);
  return shards_[index(after - begins_.begin() - 1)];
}

void Corpus::read(int64_t document, int64_t begin, span<int64_t> out) const {
  int64_t local = document;
  const Shard& shard = locate(local);
  const auto count = ssize(out);
  const int64_t first = shard.index.begin(local), size = shard.index.begin(local + 1) - first;
  PITH_CHECK(begin >= 0 && begin <= size && count <= size - begin,
    "{}: document {} has {} tokens, not those from {} to {}", prefix_, document, size, begin,
    begin + count);
  const char* ids = shard.bin.data.get() + (first + begin) * shard.index.width;
  for (int64_t i = 0; i < count; ++i)
    out[index(i)] = shard.index.width == 2 ? load<uint16_t>(ids, i) : load<int32_t>(ids, i);
  const int64_t limit = vocab_size() > 0 ? vocab_size() : numeric_limits<int64_t>::max();
  const auto bad = ranges::find_if(out, [&](int64_t id) { return id < 0 || id >= limit; });
  if (bad != out.end())
    PITH_FAIL_HINT("`pithtrain corpus verify` tells what is damaged",
      "{}: document {}, token {}: id {} is outside the vocabulary of {}", prefix_, document,
      begin + (bad - out.begin()), *bad, vocab_size());
}

vector<int32_t> Corpus::ids(int64_t document) const {
  vector<int64_t> wide(index(length(document)));
  read(document, 0, wide);
  return {wide.begin(), wide.end()};
}

vector<string> verify_corpus(const string& prefix) {
  vector<string> problems;
  const auto attempt = [&](const auto& part) {
    if (auto problem = problem_of(part); !problem.empty()) problems.push_back(std::move(problem));
  };
  attempt([&] {
    const Corpus corpus(prefix);
    for (const Corpus::Shard& shard: corpus.shards_) shard.verify(problems);
    vector<int64_t> ids(1 << 16);
    for (int64_t d = 0; d < corpus.num_documents(); ++d)
      attempt([&] { // an id outside the vocabulary: the first of this document
        for (int64_t at = 0, left = corpus.length(d); left > 0;) {
          const int64_t count = min(left, ssize(ids));
          corpus.read(d, at, span(ids).first(index(count)));
          at += count, left -= count;
        }
      });
  });
  return problems;
}

CorpusWriter::CorpusWriter(string prefix, int64_t vocab_size, string tokenizer_hash,
  int64_t shard_tokens, const CorpusProgress* resume)
    : prefix_(std::move(prefix)), tokenizer_hash_(std::move(tokenizer_hash)),
      vocab_size_(vocab_size), width_(vocab_size <= 65536 ? 2 : 4), shard_tokens_(shard_tokens),
      wanted_(resume != nullptr), at_(resume ? *resume : CorpusProgress{}) {
  PITH_CHECK(vocab_size > 0 && vocab_size <= int64_t{1} << 31, "corpus {}: a vocabulary of {} ids",
    prefix_, vocab_size);
  PITH_CHECK(
    fs::path(prefix_).has_filename(), "{} names a folder, not the corpora files in it", prefix_);
  fs::create_directories(fs::absolute(prefix_).parent_path());
  open_shard();
}

CorpusWriter::~CorpusWriter() {
  std::error_code ignored;
  for (int64_t shard = 0; !wanted_ && shard <= at_.shard; ++shard)
    for (const char* extension: {".bin.tmp", ".len.tmp", ".idx.tmp", ".json.tmp"})
      fs::remove(working_name(prefix_, shard, shard_tokens_ > 0) + extension, ignored);
}

string CorpusWriter::base() const { return working_name(prefix_, at_.shard, shard_tokens_ > 0); }

void CorpusWriter::open_shard() {
  bin_.emplace(base() + ".bin.tmp", uint64_t(at_.tokens * width_));
  lengths_.emplace(base() + ".len.tmp", uint64_t(at_.documents) * sizeof(int32_t));
}

void CorpusWriter::add_document(span<const int32_t> ids) {
  for (size_t i = 0; i < ids.size(); ++i)
    PITH_CHECK(ids[i] >= 0 && ids[i] < vocab_size_,
      "corpus {}: document {}, token {}: id {} is outside the vocabulary of {}", prefix_,
      at_.documents, i, ids[i], vocab_size_);
  PITH_CHECK(ids.size() <= INT32_MAX, "corpus {}: document {} has {} tokens; the format ends at {}",
    prefix_, at_.documents, ids.size(), INT32_MAX);
  const auto count = ssize(ids);
  if (shard_tokens_ > 0 && at_.documents > 0 && at_.tokens + count > shard_tokens_) {
    close_shard();
    at_ = {.shard = at_.shard + 1};
    open_shard();
  }
  vector<uint16_t> narrow;
  if (width_ == 2) narrow.assign(ids.begin(), ids.end());
  const void* bytes = width_ == 2 ? static_cast<const void*>(narrow.data()) : ids.data();
  bin_->append({static_cast<const char*>(bytes), index(count * width_)});
  lengths_->append(raw(int32_t(count)));
  ++at_.documents;
  at_.tokens += count;
}

CorpusProgress CorpusWriter::sync() {
  bin_->sync();
  lengths_->sync();
  sync_folder(fs::absolute(prefix_).parent_path());
  return at_;
}

void CorpusWriter::close_shard() {
  bin_->close();
  lengths_->close();
  const MappedFile lengths = map_file(base() + ".len.tmp"), ids = map_file(base() + ".bin.tmp");
  OutputFile index(base() + ".idx.tmp");
  const auto put = [&](auto value) { index.append(raw(value)); };
  index.append(kMagic);
  put(uint64_t{1});
  put(uint8_t(width_ == 2 ? 8 : 4));
  put(at_.documents);
  put(at_.documents + 1);
  index.append(lengths.bytes());
  int64_t pointer = 0;
  for (int64_t d = 0; d < at_.documents; ++d)
    put(exchange(pointer, pointer + load<int32_t>(lengths.data.get(), d) * width_));
  for (int64_t d = 0; d <= at_.documents; ++d) put(d);
  SideFile side{.vocab_size = vocab_size_,
    .tokenizer_hash = tokenizer_hash_,
    .documents = at_.documents,
    .tokens = at_.tokens,
    .index_xxh3 = index.close()};
  for (string_view left = ids.bytes(); !left.empty();) {
    side.block_xxh3 += xxh3(left.substr(0, kBlock));
    left.remove_prefix(min<size_t>(left.size(), kBlock));
  }
  write_file("", base() + ".json.tmp", seal_json(json(side).dump(1)));
}

int64_t CorpusWriter::close() {
  close_shard();
  sync_folder(fs::absolute(prefix_).parent_path());
  return shard_tokens_ > 0 ? at_.shard + 1 : 0;
}

void CorpusWriter::finish() {
  const int64_t shards = close();
  wanted_ = true;
  publish_corpus(prefix_, shards);
}

void publish_corpus(const string& prefix, int64_t shards) {
  set<fs::path> kept;
  const fs::path folder = fs::absolute(prefix).parent_path();
  const string name = fs::path(prefix).filename().string();
  // What may be there of an older corpus that was cut otherwise, and of the writing.
  static const regex ending(
    R"((-\d{5,}-of-\d{5,})?\.(bin|idx|json)|(-\d{5,})?\.(bin|idx|json|len)\.tmp)");
  // Without .idx there is no corpus: the old ones go first, the new ones come last.
  for (const auto& [extension, old]:
    {pair{".idx", true}, pair{".bin", false}, pair{".json", false}, pair{".idx", false}})
    for (int64_t shard = 0; shard < max<int64_t>(1, shards); ++shard) {
      const fs::path from = working_name(prefix, shard, shards > 0) + extension + ".tmp";
      const fs::path to = final_name(prefix, shard, shards) + extension;
      kept.insert(to.filename());
      if (!fs::exists(from)) continue; // done before an interruption
      if (old) fs::remove(to);
      else fs::rename(from, to);
    }
  sync_folder(folder);
  for (const string& file: names_in(folder))
    if (file.starts_with(name) && !kept.contains(file) &&
      std::regex_match(file.substr(name.size()), ending))
      fs::remove(folder / file);
}
}
