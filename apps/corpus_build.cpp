#include "apps/corpus_build.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/inspect.h"
#include "core/random.h"
#include "engine/file_io.h"
#include "engine/hf_folder.h"

namespace pith {

namespace fs = std::filesystem;
using Kind = EncodedDocument::Kind;
using Fingerprint = std::array<uint64_t, 2>;

// --- the journal ---

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(InputPosition, file, offset, line)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CorpusProgress, shard, documents, tokens)

namespace {

constexpr size_t kKinds = static_cast<size_t>(Kind::kLong) + 1;

// One output, train or validation.
struct Side {
  CorpusProgress written;
  int64_t shards = 0, documents = 0, tokens = 0, shuffled = 0;
  uint64_t bytes = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Side, written, shards, documents, tokens, shuffled, bytes)

struct Journal {
  std::string phase = "encode";  // then "staged" and "shuffle" with a seed, and "written"
  InputPosition position;
  std::array<Side, 2> sides;
  std::array<int64_t, kKinds> kinds{};  // documents seen of each EncodedDocument::Kind
  int64_t seen = 0, duplicates = 0, dropped_characters = 0, longest = 0, files_read = 0;
  std::string longest_place;
  std::vector<std::string> problems;  // the first bad lines
  bool full = false;                  // stopped by max_bytes
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Journal, phase, position, sides, kinds, seen, duplicates,
    dropped_characters, longest, files_read, longest_place, problems, full)

// Fingerprints of the texts so far: an open-addressing table in memory, and an append-only file
// from which it is made again after an interruption. A table of more than a quarter of the memory
// lies in an unnamed file beside it, so that the system can put it aside.
class SeenTexts {
 public:
  SeenTexts(const fs::path& path, int64_t count, uint64_t memory)
      : path_(path),
        memory_(memory),
        log_(path, static_cast<uint64_t>(count) * sizeof(Fingerprint)) {
    grow();
    const MappedFile known = map_file(path);
    Fingerprint text;
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(&text, known.data.get() + static_cast<size_t>(i) * sizeof text, sizeof text);
      put(text);
    }
  }
  bool insert(const Fingerprint& text) {  // false when it was there
    if (!put(text)) return false;
    log_.append({reinterpret_cast<const char*>(&text), sizeof text});
    return true;
  }
  int64_t sync() {
    log_.sync();
    return static_cast<int64_t>(size_);
  }

 private:
  using Table = std::shared_ptr<Fingerprint>;

  bool put(Fingerprint text) {
    if (text == Fingerprint{}) text[0] = 1;  // all zero is a free place
    uint64_t at = text[1] & (capacity_ - 1);
    for (; table_.get()[at] != Fingerprint{}; at = (at + 1) & (capacity_ - 1))
      if (table_.get()[at] == text) return false;
    table_.get()[at] = text;
    if (++size_ > capacity_ / 4 * 3) grow();
    return true;
  }
  void grow() {
    const Table old = table_;
    const uint64_t old_capacity = capacity_;
    capacity_ = std::max<uint64_t>(1 << 16, 2 * capacity_);
    table_ = map(capacity_ * sizeof(Fingerprint));
    size_ = 0;
    for (uint64_t i = 0; i < old_capacity; ++i)
      if (old.get()[i] != Fingerprint{}) put(old.get()[i]);
  }
  Table map(uint64_t bytes) const {
    int file = -1;
    if (bytes > memory_ / 4) {
      std::string name = path_.string() + "-XXXXXX";
      file = ::mkstemp(name.data());
      PITH_CHECK(file >= 0 && ::unlink(name.c_str()) == 0 &&
                     ::posix_fallocate(file, 0, static_cast<off_t>(bytes)) == 0,
          "cannot make a file of {} bytes beside {}", bytes, path_.string());
    }
    void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
        file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
    if (file >= 0) ::close(file);
    PITH_CHECK(pages != MAP_FAILED, "no memory for {} fingerprints", bytes / sizeof(Fingerprint));
    return {static_cast<Fingerprint*>(pages), [bytes](Fingerprint* p) { ::munmap(p, bytes); }};
  }

  fs::path path_;
  uint64_t memory_, capacity_ = 0, size_ = 0;
  Table table_;
  OutputFile log_;
};

// --- progress on the standard error ---

class Progress {
 public:
  void show(uint64_t text, int64_t documents, int64_t tokens, double share) {
    const auto now = Clock::now();
    if (now - shown_ < (terminal_ ? std::chrono::milliseconds(500) : std::chrono::seconds(10)))
      return;
    shown_ = now;
    const double seconds = std::chrono::duration<double>(now - begin_).count();
    if (first_share_ < 0) first_share_ = share;
    const double gained = share - first_share_;
    const auto left = static_cast<int64_t>(gained > 0 ? seconds * (1 - share) / gained : 0);
    fmt::print(stderr, "{}{:5.1f}%  {:.1f} MB/s  {} documents  {} tokens  left {}:{:02}:{:02}{}",
        terminal_ ? "\r" : "", 100 * share, static_cast<double>(text) / 1e6 / seconds,
        grouped(documents), grouped(tokens), left / 3600, left / 60 % 60, left % 60,
        terminal_ ? "\x1b[K" : "\n");
    drawn_ = terminal_;
  }
  void clear() {
    if (std::exchange(drawn_, false)) fmt::print(stderr, "\r\x1b[K");
  }

 private:
  using Clock = std::chrono::steady_clock;
  const bool terminal_ = ::isatty(STDERR_FILENO) == 1;
  bool drawn_ = false;
  double first_share_ = -1;
  Clock::time_point begin_ = Clock::now(), shown_ = begin_;
};

// --- the build ---

constexpr const char* kNames[] = {"train", "validation"};
constexpr const char* kGoOn = "what was done is kept: the same command goes on from there";

class Build {
 public:
  explicit Build(CorpusBuildOptions options)
      : options_(std::move(options)),
        tokenizer_(
            options_.tokenizer.empty() ? Tokenizer::bytes() : Tokenizer::load(options_.tokenizer)),
        files_(list_inputs(options_.paths, options_.endings)),
        folder_(options_.out + ".build") {
    PITH_CHECK(fs::path(options_.out).has_filename(), "--out {} names a folder", options_.out);
    outs_.push_back(options_.out);
    if (!options_.validation_out.empty()) outs_.push_back(options_.validation_out);
    PITH_CHECK(outs_.size() == 1 || fs::absolute(outs_[0]).lexically_normal() !=
                                        fs::absolute(outs_[1]).lexically_normal(),
        "--out and --validation-out are the same: {}", options_.out);
    PITH_CHECK(
        options_.memory / 40 >= options_.encode.read.max_line,  // measured: JSON of many numbers
        "--memory {} is less than 40 times --max-line {}", options_.memory,
        options_.encode.read.max_line);
    options_.encode.bytes_in_flight = options_.memory / 40;
    options_.encode.end_id = end_id();
  }

  void run() {
    begin();
    if (journal_.phase == "encode") {
      open_writers(options_.seed ? "stage" : "");
      encode_all();
      close_writers(options_.seed ? "staged" : "written");
    }
    if (journal_.phase == "staged") {
      for (size_t i = 0; i < outs_.size(); ++i) publish_corpus(stage(i), 0);
      for (Side& side : journal_.sides) side.written = {};
      journal_.phase = "shuffle";
      save_journal();
    }
    if (journal_.phase == "shuffle") {
      open_writers("");
      shuffle_all();
      close_writers("written");
    }
    for (size_t i = 0; i < outs_.size(); ++i) {
      tokenizer_.save(outs_[i] + ".tokenizer");
      publish_corpus(outs_[i], journal_.sides[i].shards);
    }
    fs::remove_all(folder_);
    print_summary();
  }

 private:
  std::optional<int32_t> end_id() const {
    if (!options_.end_token) {
      if (!tokenizer_.eos_id())
        PITH_FAIL_HINT("name one with --end-token, or give --end-token '' for none",
            "this tokenizer names no token that ends a document");
      return tokenizer_.eos_id();
    }
    if (options_.end_token->empty()) return std::nullopt;
    const auto id = tokenizer_.id(*options_.end_token);
    PITH_CHECK(id, "--end-token: this tokenizer has no token {}", *options_.end_token);
    return id;
  }

  template <class T>
  T total(T Side::* count) const {
    return journal_.sides[0].*count + journal_.sides[1].*count;
  }

  // Everything that the result depends on, one a line.
  std::string plan() const {
    const EncodeSettings& encode = options_.encode;
    std::string plan = fmt::format(
        "text field: {}\nid field: {}\nmaximum line: {}\nminimum length: {}\nmaximum length: {}\n"
        "tokenizer: {}\nend token: {}\nseed: {}\nvalidation share: {}\nvalidation corpus: {}\n"
        "maximum bytes: {}\nshard tokens: {}\nduplicates: {}\n",
        encode.read.text_field, encode.read.id_field, encode.read.max_line, encode.min_length,
        encode.max_length, hex(tokenizer_.hash()), encode.end_id.value_or(-1),
        options_.seed ? std::to_string(*options_.seed) : "none", options_.validation_share,
        options_.validation_out, options_.max_bytes, options_.shard_tokens,
        options_.keep_duplicates ? "kept" : "removed");
    for (const InputFile& file : files_)
      plan += fmt::format("input: {} ({} bytes, {})\n", file.path, file.bytes, file.modified_ns);
    return plan;
  }

  // Locks the build, then begins it or finds out where it was.
  void begin() {
    if (const auto parent = fs::path(options_.out).parent_path(); !parent.empty())
      fs::create_directories(parent);
    fs::create_directories(folder_);
    lock_ = ::open((folder_ / "lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
    PITH_CHECK(lock_ >= 0, "cannot write to {}", folder_.string());
    PITH_CHECK(::flock(lock_, LOCK_EX | LOCK_NB) == 0, "{} is being built by another process",
        options_.out);
    const std::string now = plan();
    const fs::path journal = folder_ / "journal.json", plan_file = folder_ / "plan.txt";
    if (options_.restart || !fs::exists(journal)) {
      fs::remove(journal);
      write_file(folder_, "plan.txt", now);
      sync_folder(folder_);
    } else {
      const std::string before = read_file(plan_file);
      const auto place = std::mismatch(now.begin(), now.end(), before.begin(), before.end());
      const auto line = [&](const std::string& text, auto at) {
        const auto begin = text.rfind('\n', static_cast<size_t>(at - text.begin()) - 1) + 1;
        return at == text.end() ? "nothing" : text.substr(begin, text.find('\n', begin) - begin);
      };
      if (now != before)
        PITH_FAIL_HINT("give the options and inputs it was begun with, or --restart",
            "the unfinished build of {} cannot go on: it was begun with [{}], now it is "
            "[{}]",
            options_.out, line(before, place.second), line(now, place.first));
      const std::string text = read_file(journal);
      check_seal(text, journal.string());
      journal_ = parse_json(text, journal.string()).get<Journal>();
      fmt::print(stderr, "goes on after {} documents\n", grouped(total(&Side::documents)));
    }
  }

  std::string stage(size_t i) const { return (folder_ / kNames[i]).string(); }

  void open_writers(std::string_view where) {
    for (size_t i = 0; i < outs_.size(); ++i)
      writers_.emplace_back(where.empty() ? outs_[i] : stage(i), tokenizer_.vocab_size(),
          hex(tokenizer_.hash()), where.empty() ? options_.shard_tokens : 0,
          &journal_.sides[i].written);
    if (journal_.phase == "encode" && !options_.keep_duplicates)
      seen_.emplace(folder_ / "seen", journal_.seen, options_.memory);
    saved_ = std::chrono::steady_clock::now();
  }

  void close_writers(const char* next_phase) {
    for (size_t i = 0; i < outs_.size(); ++i) {
      if (journal_.sides[i].documents > 0) continue;
      for (CorpusWriter& writer : writers_) writer.discard();
      fs::remove_all(folder_);
      print_skipped();
      PITH_FAIL_HINT(
          i == 0 ? "look at the paths, --extensions and --text-field" : "raise --validation-share",
          "no document for {}", outs_[i]);
    }
    for (size_t i = 0; i < outs_.size(); ++i) journal_.sides[i].shards = writers_[i].close();
    writers_.clear();
    seen_.reset();
    journal_.phase = next_phase;
    save_journal();
  }

  void save_journal() {
    for (size_t i = 0; i < writers_.size(); ++i) journal_.sides[i].written = writers_[i].sync();
    if (seen_) journal_.seen = seen_->sync();
    write_file(folder_, "journal.json.tmp", seal_json(nlohmann::json(journal_).dump(1)));
    fs::rename(folder_ / "journal.json.tmp", folder_ / "journal.json");
    sync_folder(folder_);
    saved_ = std::chrono::steady_clock::now();
  }
  void save_journal_sometimes() {
    if (std::chrono::steady_clock::now() - saved_ > std::chrono::seconds(1)) save_journal();
  }

  void encode_all() {
    uint64_t all = 1, text = 0;
    for (const InputFile& file : files_) all += file.bytes;
    CorpusEncoder encoder(files_, tokenizer_, options_.encode, journal_.position);
    EncodedChunk chunk;
    while (!journal_.full) {
      try {
        if (!encoder.next(chunk)) break;
      } catch (const Error& error) {
        save_journal();
        throw error.hint(kGoOn);
      }
      journal_.files_read = chunk.file;
      for (const EncodedDocument& document : chunk.documents) {
        take(chunk.path, document);
        if (journal_.full) break;
        text += document.bytes;
      }
      journal_.dropped_characters += chunk.dropped_characters;
      if (journal_.full) break;
      journal_.position = chunk.end;
      progress_.show(text, total(&Side::documents), total(&Side::tokens),
          static_cast<double>(chunk.bytes_read) / static_cast<double>(all));
      save_journal_sometimes();
    }
    progress_.clear();
  }

  void take(const std::string& path, const EncodedDocument& document) {
    const std::string place =
        (document.line > 0 ? fmt::format("{}:{}", path, document.line) : path) +
        (document.id.empty() ? "" : fmt::format(" ({})", document.id));
    const int64_t count = ++journal_.kinds[static_cast<size_t>(document.kind)];
    if (document.kind == Kind::kBad) return refuse(count, place + ": " + document.problem);
    if (document.kind != Kind::kGood) return;
    journal_.full =
        options_.max_bytes > 0 && total(&Side::bytes) + document.bytes > options_.max_bytes;
    if (journal_.full) return;
    if (seen_ && !seen_->insert(document.fingerprint)) {
      ++journal_.duplicates;
      return;
    }
    // The share that goes to validation depends on the content alone: a document stays on its side
    // when files are added, moved or renamed.
    const double draw = static_cast<double>(document.hash >> 11) * 0x1p-53;
    const size_t i = outs_.size() > 1 && draw < options_.validation_share ? 1 : 0;
    const auto tokens = static_cast<int64_t>(document.ids.size());
    writers_[i].add_document(document.ids);
    Side& side = journal_.sides[i];
    ++side.documents;
    side.tokens += tokens;
    side.bytes += document.bytes;
    if (tokens > journal_.longest) {
      journal_.longest = tokens;
      journal_.longest_place = place;
    }
  }

  void refuse(int64_t count, const std::string& problem) {
    if (journal_.problems.size() < 20) journal_.problems.push_back(problem);
    if (count <= options_.max_bad) return;
    progress_.clear();
    for (const std::string& line : journal_.problems) fmt::print(stderr, "bad: {}\n", line);
    PITH_FAIL_HINT("look at --text-field; raise --max-bad to go on", "more than {} bad lines: {}",
        options_.max_bad, problem);
  }

  void shuffle_all() {
    for (size_t i = 0; i < outs_.size(); ++i) {
      const Corpus from(stage(i));
      const uint64_t key = stream_key(*options_.seed, kNames[i]);
      Side& side = journal_.sides[i];
      for (; side.shuffled < from.num_documents(); ++side.shuffled) {
        const int64_t document = permuted(key, side.shuffled, from.num_documents());
        if (side.shuffled % 256 == 0) save_journal_sometimes();  // before this document
        writers_[i].add_document(document_ids(from, document));
      }
    }
  }

  void print_skipped() const {
    const auto seen = [&](Kind kind) { return journal_.kinds[static_cast<size_t>(kind)]; };
    const int64_t copies = journal_.duplicates, empty = seen(Kind::kEmpty),
                  binary = seen(Kind::kNotText), small = seen(Kind::kShort),
                  big = seen(Kind::kLong), bad = seen(Kind::kBad);
    fmt::print("{:<11} {}: {} duplicates, {} empty, {} not UTF-8 text, {} too short, {} too long\n",
        "skipped", grouped(copies + empty + binary + small + big), grouped(copies), grouped(empty),
        grouped(binary), grouped(small), grouped(big));
    if (bad > 0) fmt::print("{:<11} {} lines; the first:\n", "bad", grouped(bad));
    for (const std::string& problem : journal_.problems) fmt::print("  {}\n", problem);
  }

  void print_summary() const {
    for (size_t i = 0; i < outs_.size(); ++i) {
      const Side& side = journal_.sides[i];
      fmt::print(
          "{:<11} {} documents, {} of text, {} tokens, {:.2f} bytes a token -> {}{}.bin, "
          ".idx, .json\n",
          kNames[i], grouped(side.documents), human_bytes(side.bytes), grouped(side.tokens),
          static_cast<double>(side.bytes) / static_cast<double>(side.tokens), outs_[i],
          side.shards > 0 ? fmt::format("-*-of-{:05}", side.shards) : "");
    }
    fmt::print(
        "{:<11} {} tokens: {}\n", "longest", grouped(journal_.longest), journal_.longest_place);
    print_skipped();
    if (journal_.dropped_characters > 0)
      fmt::print("{:<11} {} characters that the tokenizer has no token for\n", "dropped",
          grouped(journal_.dropped_characters));
    if (journal_.full)
      fmt::print("{:<11} {} of {} files read; the next document would pass --max-bytes\n",
          "stopped", grouped(journal_.files_read), files_.size());
  }

  CorpusBuildOptions options_;
  Tokenizer tokenizer_;
  std::vector<InputFile> files_;
  fs::path folder_;
  std::vector<std::string> outs_;
  int lock_ = -1;  // held until the process ends
  Journal journal_;
  std::vector<CorpusWriter> writers_;
  std::optional<SeenTexts> seen_;
  std::chrono::steady_clock::time_point saved_;
  Progress progress_;
};

}  // namespace

void build_corpus(CorpusBuildOptions options) {
  // Buffers of long documents go back to the system, not to the arena of the thread that had them.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  Build(std::move(options)).run();
}

}  // namespace pith
