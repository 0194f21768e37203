#include "engine/corpus.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
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

struct IdType {
  int code;  // of the index format
  const char* name;
  int64_t width;
};
constexpr IdType kIdTypes[] = {{1, "uint8", 1}, {2, "int8", 1}, {3, "int16", 2}, {4, "int32", 4},
    {5, "int64", 8}, {8, "uint16", 2}};

const IdType& id_type(int code, const std::string& source) {
  for (const IdType& type : kIdTypes)
    if (type.code == code) return type;
  PITH_FAIL("{}: dtype code {} is not an integer type of this format", source, code);
}

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
void append_value(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// PREFIX.json as a typed record; a corpus of another program has none.
struct SideFile {
  bool present = false;
  uint64_t sum = 0;
  int64_t vocab_size = 0;
  std::string tokenizer_hash, index_sum;
  uint64_t block_bytes = kBlock;
  std::string block_sums;  // 16 hexadecimal digits a block
};

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
    PITH_CHECK(document.at("version") == 1, "{}: version {} is not known", source,
        document.at("version").dump());
    return {true, xxh3(file.bytes()), document.at("vocab_size").get<int64_t>(),
        document.at("tokenizer_hash").get<std::string>(),
        document.at("index_xxh3").get<std::string>(), document.at("block_bytes").get<uint64_t>(),
        document.at("block_xxh3").get<std::string>()};
  } catch (const json::exception& error) {
    PITH_FAIL("{}: {}", source, error.what());
  }
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
      "{}: {} bytes do not hold {} sequences and {} documents", source, bytes.size(), sequences,
      borders);
  PITH_CHECK(borders >= 1, "{}: the list of documents is empty", source);
  index.num_sequences = static_cast<int64_t>(sequences);
  index.num_documents = static_cast<int64_t>(borders) - 1;
  index.lengths = data + kHeader;
  index.pointers = index.lengths + 4 * sequences;
  index.documents = index.pointers + 8 * sequences;

  PITH_CHECK(load<int64_t>(index.documents, 0) == 0 &&
                 load<int64_t>(index.documents, index.num_documents) == index.num_sequences,
      "{}: documents do not span all {} sequences", source, sequences);
  for (int64_t d = 0; d < index.num_documents; ++d)
    PITH_CHECK(load<int64_t>(index.documents, d) <= load<int64_t>(index.documents, d + 1),
        "{}: document {} ends before it begins", source, d);
  const auto document_of = [&](int64_t sequence) {
    int64_t d = 0;
    while (load<int64_t>(index.documents, d + 1) <= sequence) ++d;
    return d;
  };
  int64_t tokens = 0;  // cannot overflow: at most 2^31 for each 12 bytes of the index
  const auto held = static_cast<int64_t>(bin_bytes / static_cast<uint64_t>(index.width));
  for (int64_t s = 0; s < index.num_sequences; ++s) {
    const auto length = load<int32_t>(index.lengths, s);
    if (length < 0 || load<int64_t>(index.pointers, s) != tokens * index.width)
      PITH_FAIL("{}: document {}: its tokens do not follow those of the one before", source,
          document_of(s));
    tokens += length;
    if (tokens > held)
      PITH_FAIL_HINT("the .bin file is cut short: copy or build the corpus again",
          "{}: document {} ends at token {}, the .bin file holds {}", source, document_of(s),
          tokens, held);
  }
  PITH_CHECK(static_cast<uint64_t>(tokens * index.width) == bin_bytes,
      "{}: the documents fill {} bytes, the .bin file has {}", source, tokens * index.width,
      bin_bytes);
  index.num_tokens = tokens;
  return index;
}

struct Corpus::Files {
  std::string prefix;
  MappedFile index_file, bin;
  CorpusIndex index;
  SideFile side;
  uint64_t index_sum = 0;

  // Index of the first id outside the vocabulary, or -1. Without a side file only negative ids are.
  int64_t first_invalid(std::span<const int64_t> ids) const {
    const int64_t limit = side.present ? side.vocab_size : std::numeric_limits<int64_t>::max();
    const auto bad =
        std::find_if(ids.begin(), ids.end(), [&](int64_t id) { return id < 0 || id >= limit; });
    return bad == ids.end() ? -1 : bad - ids.begin();
  }

  void load_ids(int64_t token, std::span<int64_t> out) const {
    const char* ids = bin.data.get() + token * index.width;
    switch (index.dtype_code) {
      case 1:
        return widen<uint8_t>(ids, out);
      case 2:
        return widen<int8_t>(ids, out);
      case 3:
        return widen<int16_t>(ids, out);
      case 4:
        return widen<int32_t>(ids, out);
      case 5:
        return widen<int64_t>(ids, out);
      default:
        return widen<uint16_t>(ids, out);
    }
  }
};

Corpus::Corpus(const std::string& prefix) {
  auto files = std::make_shared<Files>();
  files->prefix = prefix;
  if (!fs::exists(prefix + ".idx") || !fs::exists(prefix + ".bin"))
    PITH_FAIL_HINT(
        "give the path without extension; `pithtrain corpus build --out PREFIX` makes one",
        "there is no corpus {0}: {0}.{1} is missing", prefix,
        fs::exists(prefix + ".idx") ? "bin" : "idx");
  files->side = read_side_file(prefix + ".json");
  files->index_file = map_file(prefix + ".idx");
  files->bin = map_file(prefix + ".bin");
  files->index_sum = xxh3(files->index_file.bytes());
  files->index = parse_corpus_index(files->index_file.bytes(), files->bin.size, prefix + ".idx");
  if (const SideFile& side = files->side; side.present) {
    PITH_CHECK(hex(files->index_sum) == side.index_sum,
        "{}.idx is damaged: its bytes do not match the sum in {}.json", prefix, prefix);
    PITH_CHECK(side.block_bytes > 0 && side.vocab_size > 0 &&
                   side.block_sums.size() ==
                       16 * ((files->bin.size + side.block_bytes - 1) / side.block_bytes),
        "{}.json does not belong to this {}.bin of {} bytes", prefix, prefix, files->bin.size);
  }
  files_ = std::move(files);
}

int64_t Corpus::num_documents() const { return files_->index.num_documents; }
int64_t Corpus::num_tokens() const { return files_->index.num_tokens; }
int64_t Corpus::vocab_size() const { return files_->side.vocab_size; }
std::string Corpus::tokenizer_hash() const { return files_->side.tokenizer_hash; }
const std::string& Corpus::prefix() const { return files_->prefix; }

std::string Corpus::dtype() const { return id_type(files_->index.dtype_code, files_->prefix).name; }

int64_t Corpus::length(int64_t document) const {
  PITH_CHECK(document >= 0 && document < num_documents(), "{}: there is no document {} among {}",
      prefix(), document, num_documents());
  return files_->index.begin(document + 1) - files_->index.begin(document);
}

void Corpus::read(int64_t document, int64_t begin, std::span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  const int64_t size = length(document);
  PITH_CHECK(begin >= 0 && begin <= size && count <= size - begin,
      "{}: document {} has {} tokens, not those from {} to {}", prefix(), document, size, begin,
      begin + count);
  files_->load_ids(files_->index.begin(document) + begin, out);
  if (const int64_t bad = files_->first_invalid(out); bad >= 0)
    PITH_FAIL_HINT("`pithtrain corpus verify` tells what is damaged",
        "{}: document {}, token {}: id {} is outside the vocabulary of {}", prefix(), document,
        begin + bad, out[static_cast<size_t>(bad)], vocab_size());
}

std::string Corpus::fingerprint() const {
  return hex(xxh3(
      fmt::format("{} {} {}", hex(files_->index_sum), files_->bin.size, hex(files_->side.sum))));
}

std::vector<std::string> verify_corpus(const std::string& prefix) {
  std::vector<std::string> problems;
  try {
    const Corpus corpus(prefix);
    const auto& files = *corpus.files_;
    const auto document_at = [&](uint64_t byte) {  // the last one that begins at or before it
      int64_t low = 0, high = corpus.num_documents();
      while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        const bool before =
            files.index.begin(middle) * files.index.width <= static_cast<int64_t>(byte);
        (before ? low : high) = middle;
      }
      return low;
    };
    for (size_t block = 0; block < files.side.block_sums.size() / 16; ++block) {
      const uint64_t begin = block * files.side.block_bytes;
      const std::string_view bytes = files.bin.bytes().substr(begin, files.side.block_bytes);
      if (hex(xxh3(bytes)) != std::string_view(files.side.block_sums).substr(16 * block, 16))
        problems.push_back(fmt::format(
            "{}.bin is damaged between bytes {} and {}: documents {} to {}", prefix, begin,
            begin + bytes.size(), document_at(begin), document_at(begin + bytes.size() - 1)));
    }
    std::vector<int64_t> ids(1 << 16);
    for (int64_t d = 0, bad = -1; d < corpus.num_documents(); ++d, bad = -1) {
      const int64_t size = corpus.length(d), first = files.index.begin(d);
      for (int64_t at = 0; at < size && bad < 0; at += static_cast<int64_t>(ids.size())) {
        const auto count = std::min<int64_t>(size - at, static_cast<int64_t>(ids.size()));
        const auto part = std::span(ids).first(static_cast<size_t>(count));
        files.load_ids(first + at, part);
        bad = files.first_invalid(part);
        if (bad < 0) continue;
        problems.push_back(
            fmt::format("{}.bin: document {}, token {}: id {} is outside the "
                        "vocabulary",
                prefix, d, at + bad, part[static_cast<size_t>(bad)]));
      }
    }
  } catch (const Error& error) {
    problems.push_back(error.message());
  }
  return problems;
}

struct CorpusWriter::State {
  std::string prefix, tokenizer_hash;
  int64_t vocab_size = 0, width = 0, tokens = 0;
  OutputFile bin;
  std::vector<int32_t> lengths;
  std::string block, block_sums;
  bool finished = false;

  State(std::string path, int64_t vocabulary, std::string hash)
      : prefix(std::move(path)),
        tokenizer_hash(std::move(hash)),
        vocab_size(vocabulary),
        width(vocabulary <= 65536 ? 2 : 4),
        bin(prefix + ".bin.tmp") {}

  ~State() {
    std::error_code ignored;
    for (const char* extension : {".bin.tmp", ".idx.tmp", ".json.tmp"})
      if (!finished) fs::remove(prefix + extension, ignored);
  }

  void end_block() {
    if (block.empty()) return;
    block_sums += hex(xxh3(block));
    bin.append(block);
    block.clear();
  }

  template <class T>
  void append(std::span<const int32_t> ids) {
    for (const int32_t id : ids) {
      append_value(block, static_cast<T>(id));
      if (block.size() == kBlock) end_block();
    }
  }

  void write_index(const std::string& path, uint64_t& sum) const {
    OutputFile out(path);
    const auto count = static_cast<uint64_t>(lengths.size());
    std::string bytes(kMagic);
    append_value<uint64_t>(bytes, 1);
    append_value<uint8_t>(bytes, width == 2 ? 8 : 4);
    append_value<uint64_t>(bytes, count);
    append_value<uint64_t>(bytes, count + 1);
    const auto put = [&](auto value) {
      append_value(bytes, value);
      if (bytes.size() < kBlock) return;
      out.append(bytes);
      bytes.clear();
    };
    int64_t pointer = 0;
    for (const int32_t length : lengths) put(length);
    for (const int32_t length : lengths) {
      put(pointer);
      pointer += length * width;
    }
    for (uint64_t d = 0; d <= count; ++d) put(static_cast<int64_t>(d));
    out.append(bytes);
    sum = out.close();
  }
};

CorpusWriter::CorpusWriter(std::string prefix, int64_t vocab_size, std::string tokenizer_hash) {
  PITH_CHECK(vocab_size > 0 && vocab_size <= int64_t{1} << 31, "corpus {}: a vocabulary of {} ids",
      prefix, vocab_size);
  PITH_CHECK(
      fs::path(prefix).has_filename(), "{} names a folder, not the corpora files in it", prefix);
  if (const auto folder = fs::path(prefix).parent_path(); !folder.empty())
    fs::create_directories(folder);
  state_ = std::make_shared<State>(std::move(prefix), vocab_size, std::move(tokenizer_hash));
}

void CorpusWriter::add_document(std::span<const int32_t> ids) {
  State& state = *state_;
  PITH_CHECK(!state.finished, "corpus {} is finished already", state.prefix);
  const auto number = state.lengths.size();
  for (size_t i = 0; i < ids.size(); ++i)
    PITH_CHECK(ids[i] >= 0 && ids[i] < state.vocab_size,
        "corpus {}: document {}, token {}: id {} is outside the vocabulary of {}", state.prefix,
        number, i, ids[i], state.vocab_size);
  PITH_CHECK(ids.size() <= INT32_MAX, "corpus {}: document {} has {} tokens; the format ends at {}",
      state.prefix, number, ids.size(), INT32_MAX);
  if (state.width == 2) {
    state.append<uint16_t>(ids);
  } else {
    state.append<int32_t>(ids);
  }
  state.lengths.push_back(static_cast<int32_t>(ids.size()));
  state.tokens += static_cast<int64_t>(ids.size());
}

void CorpusWriter::finish() {
  State& state = *state_;
  PITH_CHECK(!state.finished, "corpus {} is finished already", state.prefix);
  state.end_block();
  state.bin.close();
  uint64_t index_sum = 0;
  state.write_index(state.prefix + ".idx.tmp", index_sum);
  const json side = {{"format", kFormat}, {"version", 1}, {"vocab_size", state.vocab_size},
      {"tokenizer_hash", state.tokenizer_hash}, {"documents", state.lengths.size()},
      {"tokens", state.tokens}, {"index_xxh3", hex(index_sum)}, {"block_bytes", kBlock},
      {"block_xxh3", state.block_sums}};
  const fs::path folder = fs::absolute(state.prefix).parent_path();
  write_file(
      folder, fs::path(state.prefix).filename().string() + ".json.tmp", seal_json(side.dump(1)));
  // Without .idx there is no corpus: the old one goes first, the new one comes last.
  try {
    fs::remove(state.prefix + ".idx");
    for (const char* extension : {".bin", ".json", ".idx"})
      fs::rename(state.prefix + extension + ".tmp", state.prefix + extension);
  } catch (const fs::filesystem_error& error) {
    PITH_FAIL("cannot finish corpus {}: {}", state.prefix, error.what());
  }
  sync_folder(folder);
  state.finished = true;
}

}  // namespace pith
