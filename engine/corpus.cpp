#include "engine/corpus.h"

#include <nlohmann/json.hpp>
#include <system_error>

#include "core/error.h"

namespace pith {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr size_t kHeader = 9 + 8 + 1 + 8 + 8;  // of the index: nothing behind it is aligned
constexpr const char* kFormat = "pithtrain corpus";
constexpr uint64_t kBlock = 256 << 10;  // bytes of PREFIX.bin under one sum of the side file

template <class T>
void widen(const char* ids, std::span<int64_t> out) {
  for (size_t i = 0; i < out.size(); ++i) out[i] = load<T>(ids, static_cast<int64_t>(i));
}

struct IdType {
  int code;  // of the index format
  const char* name;
  int64_t width;
  void (*widen)(const char* ids, std::span<int64_t> out);
};
constexpr IdType kIdTypes[] = {{1, "uint8", 1, widen<uint8_t>}, {2, "int8", 1, widen<int8_t>},
    {3, "int16", 2, widen<int16_t>}, {4, "int32", 4, widen<int32_t>},
    {5, "int64", 8, widen<int64_t>}, {8, "uint16", 2, widen<uint16_t>}};

const IdType& id_type(int code, const std::string& source) {
  const auto* type = std::ranges::find(kIdTypes, code, &IdType::code);
  PITH_CHECK(type != std::end(kIdTypes), "{}: dtype code {} is not an integer type of this format",
      source, code);
  return *type;
}

// PREFIX.json.
struct SideFile {
  std::string format;
  int64_t version = 1, vocab_size = 0;
  std::string tokenizer_hash;
  uint64_t documents = 0, tokens = 0;
  std::string index_xxh3;
  uint64_t block_bytes = kBlock;
  std::string block_xxh3;  // 16 hexadecimal digits a block
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SideFile, format, version, vocab_size, tokenizer_hash, documents,
    tokens, index_xxh3, block_bytes, block_xxh3)

// Nothing for a corpus of another program.
std::optional<SideFile> read_side_file(const std::string& path) {
  if (!fs::exists(path)) return {};
  const std::string text = read_file(path);
  const json document = parse_json(text, path);
  if (!document.is_object() || document.value("format", json()) != kFormat)
    PITH_FAIL_HINT("another program's file: rename it to read the corpus without it",
        "{}: not the side file of a corpus", path);
  check_seal(text, path);
  try {
    PITH_CHECK(document.at("version") == 1, "{}: version {} is not known", path,
        document.at("version").dump());
    return document.get<SideFile>();
  } catch (const json::exception& error) {
    PITH_FAIL("{}: {}", path, error.what());
  }
}

// Where a writer's ids go first.
std::string temporary_bin(const std::string& prefix, int64_t vocab_size) {
  PITH_CHECK(vocab_size > 0 && vocab_size <= int64_t{1} << 31, "corpus {}: a vocabulary of {} ids",
      prefix, vocab_size);
  const fs::path path(prefix);
  PITH_CHECK(path.has_filename(), "{} names a folder, not the corpora files in it", prefix);
  if (path.has_parent_path()) fs::create_directories(path.parent_path());
  return prefix + ".bin.tmp";
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
  const auto version = load<uint64_t>(data + 9), sequences = load<uint64_t>(data + 18),
             borders = load<uint64_t>(data + 26);
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

Corpus::Corpus(const std::string& prefix) : prefix_(prefix) {
  for (const char* extension : {".idx", ".bin"})
    if (!fs::exists(prefix + extension))
      PITH_FAIL_HINT(
          "give the path without extension; `pithtrain corpus build --out PREFIX` makes one",
          "there is no corpus {0}: {0}{1} is missing", prefix, extension);
  const auto side = read_side_file(prefix + ".json");
  index_file_ = map_file(prefix + ".idx");
  bin_ = map_file(prefix + ".bin");
  const std::string index_sum = hex(xxh3(index_file_.bytes()));
  index_ = parse_corpus_index(index_file_.bytes(), bin_.size, prefix + ".idx");
  if (side) {
    PITH_CHECK(index_sum == side->index_xxh3,
        "{}.idx is damaged: its bytes do not match the sum in {}.json", prefix, prefix);
    PITH_CHECK(side->block_bytes > 0 && side->vocab_size > 0 &&
                   side->block_xxh3.size() ==
                       16 * ((bin_.size + side->block_bytes - 1) / side->block_bytes),
        "{}.json does not belong to this {}.bin of {} bytes", prefix, prefix, bin_.size);
    vocab_size_ = side->vocab_size;
    tokenizer_hash_ = side->tokenizer_hash;
  }
  const uint64_t side_sum = side ? xxh3(read_file(prefix + ".json")) : 0;
  fingerprint_ = hex(xxh3(fmt::format("{} {} {}", index_sum, bin_.size, hex(side_sum))));
}

std::string Corpus::dtype() const { return id_type(index_.dtype_code, prefix_).name; }

int64_t Corpus::length(int64_t document) const {
  PITH_CHECK(document >= 0 && document < num_documents(), "{}: there is no document {} among {}",
      prefix_, document, num_documents());
  return index_.begin(document + 1) - index_.begin(document);
}

void Corpus::read(int64_t document, int64_t begin, std::span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  const int64_t size = length(document);
  PITH_CHECK(begin >= 0 && begin <= size && count <= size - begin,
      "{}: document {} has {} tokens, not those from {} to {}", prefix_, document, size, begin,
      begin + count);
  const char* ids = bin_.data.get() + (index_.begin(document) + begin) * index_.width;
  id_type(index_.dtype_code, prefix_).widen(ids, out);
  const int64_t limit = vocab_size_ > 0 ? vocab_size_ : std::numeric_limits<int64_t>::max();
  const auto bad = std::ranges::find_if(out, [&](int64_t id) { return id < 0 || id >= limit; });
  if (bad != out.end())
    PITH_FAIL_HINT("`pithtrain corpus verify` tells what is damaged",
        "{}: document {}, token {}: id {} is outside the vocabulary of {}", prefix_, document,
        begin + (bad - out.begin()), *bad, vocab_size_);
}

std::vector<std::string> verify_corpus(const std::string& prefix) {
  std::vector<std::string> problems;
  try {
    const Corpus corpus(prefix);
    const SideFile side = read_side_file(prefix + ".json").value_or(SideFile{});
    const auto document_at = [&](uint64_t byte) {  // the last one that begins at or before it
      const auto token = static_cast<int64_t>(byte) / corpus.index_.width;
      int64_t low = 0, high = corpus.num_documents();
      while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (corpus.index_.begin(middle) <= token ? low : high) = middle;
      }
      return low;
    };
    for (size_t block = 0; block < side.block_xxh3.size() / 16; ++block) {
      const uint64_t begin = block * side.block_bytes;
      const std::string_view bytes = corpus.bin_.bytes().substr(begin, side.block_bytes);
      if (side.block_xxh3.compare(16 * block, 16, hex(xxh3(bytes))) != 0)
        problems.push_back(fmt::format(
            "{}.bin is damaged between bytes {} and {}: documents {} to {}", prefix, begin,
            begin + bytes.size(), document_at(begin), document_at(begin + bytes.size() - 1)));
    }
    std::vector<int64_t> ids(1 << 16);
    for (int64_t d = 0; d < corpus.num_documents(); ++d) {
      try {
        for (int64_t at = 0, left = corpus.length(d); left > 0;) {
          const int64_t count = std::min(left, std::ssize(ids));
          corpus.read(d, at, std::span(ids).first(static_cast<size_t>(count)));
          at += count, left -= count;
        }
      } catch (const Error& error) {  // an id outside the vocabulary: the first of this document
        problems.push_back(error.message());
      }
    }
  } catch (const Error& error) {
    problems.push_back(error.message());
  }
  return problems;
}

CorpusWriter::CorpusWriter(std::string prefix, int64_t vocab_size, std::string tokenizer_hash)
    : prefix_(std::move(prefix)),
      tokenizer_hash_(std::move(tokenizer_hash)),
      vocab_size_(vocab_size),
      width_(vocab_size <= 65536 ? 2 : 4),
      bin_(temporary_bin(prefix_, vocab_size)) {}

CorpusWriter::~CorpusWriter() {
  std::error_code ignored;
  for (const char* extension : {".bin.tmp", ".idx.tmp", ".json.tmp"})
    fs::remove(prefix_ + extension, ignored);
}

void CorpusWriter::end_block() {
  if (block_.empty()) return;
  block_sums_ += hex(xxh3(block_));
  bin_.append(block_);
  block_.clear();
}

void CorpusWriter::add_document(std::span<const int32_t> ids) {
  for (size_t i = 0; i < ids.size(); ++i)
    PITH_CHECK(ids[i] >= 0 && ids[i] < vocab_size_,
        "corpus {}: document {}, token {}: id {} is outside the vocabulary of {}", prefix_,
        lengths_.size(), i, ids[i], vocab_size_);
  PITH_CHECK(ids.size() <= INT32_MAX, "corpus {}: document {} has {} tokens; the format ends at {}",
      prefix_, lengths_.size(), ids.size(), INT32_MAX);
  lengths_.push_back(static_cast<int32_t>(ids.size()));
  for (const int32_t id : ids) {
    block_.append(reinterpret_cast<const char*>(&id), width_);  // its low bytes come first
    if (block_.size() == kBlock) end_block();
  }
}

void CorpusWriter::finish() {
  end_block();
  bin_.close();
  OutputFile index(prefix_ + ".idx.tmp");
  const auto put = [&](auto value) { index.append(raw(value)); };
  index.append(kMagic);
  put(uint64_t{1});
  put(static_cast<uint8_t>(width_ == 2 ? 8 : 4));
  put(uint64_t{lengths_.size()});
  put(uint64_t{lengths_.size() + 1});
  uint64_t pointer = 0;
  for (const int32_t length : lengths_) put(length);
  for (const int32_t length : lengths_)
    put(std::exchange(pointer, pointer + static_cast<uint64_t>(length) * width_));
  for (uint64_t d = 0; d <= lengths_.size(); ++d) put(d);
  const SideFile side{kFormat, 1, vocab_size_, tokenizer_hash_, lengths_.size(),
      bin_.bytes() / width_, hex(index.close()), kBlock, block_sums_};
  const fs::path path = fs::absolute(prefix_);
  write_file(
      path.parent_path(), path.filename().string() + ".json.tmp", seal_json(json(side).dump(1)));
  // Without .idx there is no corpus: the old one goes first, the new one comes last.
  try {
    fs::remove(prefix_ + ".idx");
    for (const char* extension : {".bin", ".json", ".idx"})
      fs::rename(prefix_ + extension + ".tmp", prefix_ + extension);
  } catch (const fs::filesystem_error& error) {
    PITH_FAIL("cannot finish corpus {}: {}", prefix_, error.what());
  }
  sync_folder(path.parent_path());
}

}  // namespace pith
