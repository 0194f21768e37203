// pithtrain corpus: makes corpora of text, and looks into them. Unfinished work of a build lies in
// OUT.build/ and in *.tmp files beside the outputs. A journal names input position and output sizes
// of one moment, to which an interrupted build is cut back: the result depends neither on
// interruptions nor on the number of workers.
#include "engine/corpus.h"
#include <ATen/ops/from_file.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/file.h>
#include <unistd.h>
#include <nlohmann/json.hpp>
#include "apps/commands.h"
#include "engine/metrics.h"
#include "text/corpus_reader.h"

namespace pith {
using Fingerprint = array<uint64_t, 2>;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(InputPosition, file, offset, line)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CorpusProgress, shard, documents, tokens)

namespace {
// One output, train or validation.
struct Side {
  CorpusProgress written;
  int64_t shards = 0, documents = 0, tokens = 0;
  uint64_t bytes = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Side, written, shards, documents, tokens, bytes)

struct Journal {
  vector<string> plan;
  bool encoded = false; // all that is left is to publish
  InputPosition position;
  array<Side, 2> sides;
  map<string, int64_t> skipped; // why: how many
  int64_t bad = 0, dropped_characters = 0, longest = 0;
  string longest_place;
  vector<string> problems; // the first bad lines
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Journal, plan, encoded, position, sides, skipped, bad,
  dropped_characters, longest, longest_place, problems)

struct BuildOptions {
  vector<string> paths, endings;
  string out, validation_out, tokenizer; // tokenizer: file or folder, "" = bytes
  optional<string> end_token; // default: the tokenizer's; "" = none
  EncodeSettings encode; // its text, lengths, workers
  double validation_share = 0;
  uint64_t memory = uint64_t{1} << 30;
  int64_t shard_tokens = 0, max_bad = 100;
  bool keep_duplicates = false, restart = false;
};

// Fingerprints of the texts so far: an open-addressing table in an unnamed file, for memory may be
// short, and an append-only file from which it is made again after an interruption.
class SeenTexts {
 public:
  SeenTexts(const fs::path& path, int64_t count)
      : path_(path), size_(count), log_(path, uint64_t(count) * sizeof(Fingerprint)) {
    make_table();
  }
  bool insert(const Fingerprint& text) { // false when it was there
    if (!put(text)) return false;
    log_.append(raw(text));
    if (++size_ > capacity_ / 4 * 3) make_table();
    return true;
  }
  void sync() { log_.sync(); }
 private:
  bool put(Fingerprint text) {
    if (text == Fingerprint{}) text[0] = 1; // all zero is a free place
    const auto mask = uint64_t(capacity_ - 1);
    const auto table = static_cast<Fingerprint*>(table_.data_ptr());
    uint64_t at = text[1] & mask;
    for (; table[at] != Fingerprint{}; at = (at + 1) & mask)
      if (table[at] == text) return false;
    table[at] = text;
    return true;
  }
  void make_table() { // of what is in the log
    while (size_ > capacity_ / 4 * 3) capacity_ *= 2;
    const string name = path_.string() + ".table";
    OutputFile file(name); // written, so that a full disk is an error here, not a signal later
    const string free(kSmallest * sizeof(Fingerprint), '\0');
    for (int64_t i = 0; i < capacity_; i += kSmallest) file.append(free);
    file.flush();
    table_ = at::from_file(name, true, 2 * capacity_, kLong);
    fs::remove(name);
    log_.sync();
    const MappedFile known = map_file(path_);
    for (int64_t i = 0; i < size_; ++i) put(load<Fingerprint>(known.data.get(), i));
  }

  static constexpr int64_t kSmallest = 1 << 14;
  fs::path path_;
  int64_t size_, capacity_ = kSmallest;
  Tensor table_;
  OutputFile log_;
};

class Build {
 public:
  explicit Build(BuildOptions options)
      : options_(std::move(options)),
        tokenizer_(
          options_.tokenizer.empty() ? Tokenizer::bytes() : Tokenizer::load(options_.tokenizer)),
        files_(list_inputs(options_.paths, options_.endings)), folder_(options_.out + ".build"),
        outs_{options_.out} {
    PITH_CHECK(fs::path(options_.out).has_filename(), "--out {} names a folder", options_.out);
    if (!options_.validation_out.empty()) outs_.push_back(options_.validation_out);
    PITH_CHECK(
      outs_.size() == 1 || fs::weakly_canonical(outs_[0]) != fs::weakly_canonical(outs_[1]),
      "--out and --validation-out are the same: {}", options_.out);
    EncodeSettings& encode = options_.encode;
    encode.bytes_in_flight = options_.memory / 40; // measured: JSON of many numbers
    PITH_CHECK(encode.bytes_in_flight >= encode.read.max_line,
      "--memory {} is less than 40 times --max-line {}", options_.memory, encode.read.max_line);
    const auto& named = options_.end_token;
    if (!named && !tokenizer_.eos_id())
      PITH_FAIL_HINT("name one with --end-token, or give --end-token '' for none",
        "this tokenizer names no token that ends a document");
    if (named == "") return;
    encode.end_id = named ? tokenizer_.id(*named) : tokenizer_.eos_id();
    PITH_CHECK(encode.end_id, "--end-token: this tokenizer has no token {}", *named);
  }

  void run() {
    begin();
    if (!journal_.encoded) {
      open_writers();
      encode_all();
      close_writers();
    }
    for (size_t i = 0; i < outs_.size(); ++i) {
      tokenizer_.save(outs_[i] + ".tokenizer");
      publish_corpus(outs_[i], journal_.sides[i].shards);
    }
    fs::remove_all(folder_);
    print_summary();
  }
 private:
  template <class T> T total(T Side::* count) const {
    return journal_.sides[0].*count + journal_.sides[1].*count;
  }

  // Everything that the result depends on.
  vector<string> plan() const {
    const EncodeSettings& encode = options_.encode;
    string plan = fmt::format(
      "text field: {}\nid field: {}\nmaximum line: {}\nminimum length: {}\nmaximum length: {}\n"
      "tokenizer: {}\nend token: {}\nvalidation share: {}\nvalidation corpus: {}\n"
      "shard tokens: {}\nduplicates: {}\n",
      encode.read.text_field, encode.read.id_field, encode.read.max_line, encode.min_length,
      encode.max_length, hex(tokenizer_.hash()), encode.end_id.value_or(-1),
      options_.validation_share, options_.validation_out, options_.shard_tokens,
      options_.keep_duplicates ? "kept" : "removed");
    for (const auto& [path, bytes, modified_ns]: files_)
      plan += fmt::format("input: {:?} ({} bytes, {})\n", path, bytes, modified_ns);
    return CLI::detail::split(plan, '\n');
  }

  // Locks the build, then begins it or finds out where it was.
  void begin() {
    fs::create_directories(folder_);
    lock_ = ::open((folder_ / "lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
    PITH_CHECK(lock_ >= 0, "cannot write to {}", folder_);
    PITH_CHECK(::flock(lock_, LOCK_EX | LOCK_NB) == 0, "another process builds {}", options_.out);
    const fs::path journal = folder_ / "journal.json";
    if (options_.restart) fs::remove(journal);
    const bool goes_on = fs::exists(journal);
    const vector<string> now = journal_.plan = plan();
    if (goes_on) journal_ = read_json(journal).get<Journal>();
    if (const auto [is, was] = ranges::mismatch(now, journal_.plan); now != journal_.plan)
      PITH_FAIL_HINT("give the options and inputs it was begun with, or --restart",
        "the unfinished build of {} cannot go on: it was begun with [{}], now it is [{}]",
        options_.out, was == journal_.plan.end() ? "nothing" : *was,
        is == now.end() ? "nothing" : *is);
    if (goes_on)
      fmt::print(stderr, "goes on after {} documents\n", grouped(total(&Side::documents)));
  }

  void open_writers() {
    for (size_t i = 0; i < outs_.size(); ++i)
      writers_.emplace_back(outs_[i], tokenizer_.vocab_size(), hex(tokenizer_.hash()),
        options_.shard_tokens, &journal_.sides[i].written);
    if (!options_.keep_duplicates) seen_.emplace(folder_ / "seen", total(&Side::documents));
    saved_ = Clock::now();
  }

  void close_writers() {
    for (size_t i = 0; i < outs_.size(); ++i) {
      if (journal_.sides[i].documents > 0) continue;
      for (CorpusWriter& writer: writers_) writer.discard();
      fs::remove_all(folder_);
      print_skipped();
      PITH_FAIL_HINT(
        i == 0 ? "look at the paths, --extensions and --text-field" : "raise --validation-share",
        "no document for {}", outs_[i]);
    }
    for (size_t i = 0; i < outs_.size(); ++i) journal_.sides[i].shards = writers_[i].close();
    writers_.clear();
    journal_.encoded = true;
    save_journal();
  }

  void save_journal() {
    const auto begin = Clock::now();
    for (size_t i = 0; i < writers_.size(); ++i) journal_.sides[i].written = writers_[i].sync();
    if (seen_) seen_->sync();
    const auto replace = nlohmann::json::error_handler_t::replace; // a path need not be UTF-8
    const string text = nlohmann::json(journal_).dump(1, ' ', false, replace);
    write_file(folder_, "journal.json.tmp", text);
    fs::rename(folder_ / "journal.json.tmp", folder_ / "journal.json");
    sync_folder(folder_);
    saved_ = Clock::now();
    saving_ = max<Clock::duration>(saved_ - begin, chrono::milliseconds(5));
  }

  void encode_all() {
    uint64_t all = 1, text = 0, already = UINT64_MAX;
    for (const InputFile& file: files_) all += file.bytes;
    const auto begin = Clock::now();
    auto shown = begin;
    CorpusEncoder encoder(files_, tokenizer_, options_.encode, journal_.position);
    for (Chunk chunk;;) {
      try {
        if (!encoder.next(chunk)) return;
      } catch (const Error&) {
        save_journal();
        fmt::print(stderr, "what was done is kept: the same command goes on from there\n");
        throw;
      }
      for (const Document& document: chunk.documents) {
        take(chunk.path, document);
        text += document.bytes;
      }
      journal_.dropped_characters += chunk.dropped_characters;
      journal_.position = chunk.end;
      // For a twentieth of the time at most.
      if (Clock::now() - saved_ > 20 * saving_) save_journal();
      already = min(already, chunk.bytes_read);
      if (Clock::now() - shown < chrono::seconds(10)) continue;
      shown = Clock::now();
      const double seconds = seconds_since(begin), done = real(chunk.bytes_read - already + 1);
      fmt::print(stderr, "{}%  {:.1f} MB/s  {} documents  {} tokens  left {}\n",
        100 * chunk.bytes_read / all, real(text) / 1e6 / seconds, grouped(total(&Side::documents)),
        grouped(total(&Side::tokens)), human_time(seconds / done * real(all - chunk.bytes_read)));
    }
  }

  void take(const string& path, const Document& document) {
    string place = document.line > 0 ? fmt::format("{}:{}", path, document.line) : path;
    if (!document.id.empty()) place += fmt::format(" ({})", document.id);
    if (!document.problem.empty()) return refuse(place + ": " + document.problem);
    const bool is_new = !document.skipped.empty() || !seen_ || seen_->insert(document.fingerprint);
    const string skipped = is_new ? document.skipped : "duplicates";
    if (!skipped.empty()) {
      ++journal_.skipped[skipped];
      return;
    }
    // By content alone: a document stays on its side when files are added, moved or renamed.
    const double draw = real(document.hash >> 11) * 0x1p-53;
    const size_t i = outs_.size() > 1 && draw < options_.validation_share ? 1 : 0;
    const auto tokens = int64_t(document.ids.size());
    writers_[i].add_document(document.ids);
    Side& side = journal_.sides[i];
    ++side.documents;
    side.tokens += tokens;
    side.bytes += document.bytes;
    if (tokens <= journal_.longest) return;
    journal_.longest = tokens;
    journal_.longest_place = place;
  }

  void refuse(const string& problem) {
    if (journal_.problems.size() < 20) journal_.problems.push_back(problem);
    if (++journal_.bad <= options_.max_bad) return;
    print_skipped();
    PITH_FAIL_HINT("look at --text-field; raise --max-bad to go on", "more than {} bad lines: {}",
      options_.max_bad, problem);
  }

  void print_skipped() const {
    int64_t count = 0;
    vector<string> reasons;
    for (const auto& [reason, documents]: journal_.skipped) {
      count += documents;
      reasons.push_back(fmt::format("{} {}", grouped(documents), reason));
    }
    if (count > 0) line("skipped", "{}: {}", grouped(count), fmt::join(reasons, ", "));
    if (journal_.bad > 0) line("bad", "{} lines; the first:", grouped(journal_.bad));
    for (const string& problem: journal_.problems) fmt::print("  {}\n", problem);
  }

  void print_summary() const {
    for (size_t i = 0; i < outs_.size(); ++i) {
      const Side& side = journal_.sides[i];
      line(i == 0 ? "train" : "validation",
        "{} documents, {} of text, {} tokens, {:.2f} bytes a token -> {}{}.bin, .idx, .json",
        grouped(side.documents), human_bytes(side.bytes), grouped(side.tokens),
        real(side.bytes) / real(side.tokens), outs_[i],
        side.shards > 0 ? fmt::format("-*-of-{:05}", side.shards) : "");
    }
    line("longest", "{} tokens: {}", grouped(journal_.longest), journal_.longest_place);
    print_skipped();
    if (const int64_t dropped = journal_.dropped_characters; dropped > 0)
      line("dropped", "{} characters that the tokenizer has no token for", grouped(dropped));
  }

  BuildOptions options_;
  Tokenizer tokenizer_;
  vector<InputFile> files_;
  fs::path folder_;
  vector<string> outs_;
  int lock_ = -1; // held until the process ends
  Journal journal_;
  deque<CorpusWriter> writers_;
  optional<SeenTexts> seen_;
  Clock::time_point saved_;
  Clock::duration saving_{}; // how long that took
};

struct ShowOptions {
  string prefix, tokenizer;
  int64_t document = 0;
  bool ids = false, tokens = false;
};

// A document's text; or one line a token: place, id, text; or its ids.
void show(const ShowOptions& options) {
  const vector<int32_t> ids = Corpus(options.prefix).ids(options.document);
  const string beside = options.prefix + ".tokenizer";
  optional<Tokenizer> tokenizer;
  if (!options.tokenizer.empty() || fs::is_directory(beside))
    tokenizer = Tokenizer::load(options.tokenizer.empty() ? beside : options.tokenizer);
  PITH_CHECK(tokenizer || !options.tokens, "{} has no tokenizer: give --tokenizer", options.prefix);
  if (options.ids || !tokenizer) {
    for (const int32_t id: ids) fmt::print("{}\n", id);
  } else if (options.tokens) {
    for (size_t i = 0; i < ids.size(); ++i)
      fmt::print("{} {} {:?}\n", i, ids[i],
        tokenizer->is_special(ids[i]) ? tokenizer->token(ids[i])
                                      : tokenizer->decode(span(ids).subspan(i, 1)));
  } else {
    const string text = tokenizer->decode(ids);
    std::fwrite(text.data(), 1, text.size(), stdout);
  }
}

void add_build_command(CLI::App& corpus) {
  const auto [sub, o] = add_command<BuildOptions>(
    corpus, "build", "Make a corpus of files of text", [](const BuildOptions& options) {
    // Long documents go back to the system, not to the thread's arena.
    ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
    Build(options).run();
  });
  EncodeSettings& encode = o->encode;
  encode.workers = int(max(1u, thread::hardware_concurrency()));
  sub->add_option("paths", o->paths, "files, globs, and folders")->required();
  sub->add_option("--out", o->out, "corpus to write, without extension")->required();
  sub->add_option("--tokenizer", o->tokenizer, "tokenizer.json or its folder [bytes are tokens]");
  sub
    ->add_option("--extensions", o->endings,
      "take only these from folders, e.g. .h,.jsonl.zst ('none': files without one)")
    ->delimiter(',')
    ->allow_extra_args(false);
  sub->add_option("--text-field", encode.read.text_field,
    "field of a JSON line or table: a.b is b inside a [text]");
  sub->add_option("--id-field", encode.read.id_field, "field that names a document in reports");
  sub->add_option("--end-token", o->end_token,
    "put behind each document ['' = none; the tokenizer's end of text]");
  sub->add_option("--shard-size", o->shard_tokens, "tokens a shard, e.g. 1000000000")
    ->check(CLI::PositiveNumber);
  sub->add_flag("--keep-duplicates", o->keep_duplicates, "keep documents that came before");
  sub->add_option("--min-length", encode.min_length, "skip shorter texts, bytes");
  sub->add_option("--max-length", encode.max_length, "skip longer texts, bytes");
  sub->add_option("--max-line", encode.read.max_line, "longer lines and files are bad [16MB]");
  sub->add_option("--max-bad", o->max_bad, "stop after more bad lines [100]");
  auto* share = sub->add_option("--validation-share", o->validation_share,
    "share of the documents held out, chosen by their content");
  share->check(CLI::Range(0.0, 1.0));
  auto* out = sub->add_option("--validation-out", o->validation_out, "corpus of the held-out ones");
  share->needs(out);
  out->needs(share);
  sub->add_option("--workers", encode.workers, "threads [all cores]")->check(CLI::Range(1, 1024));
  sub->add_option("--memory", o->memory, "bound, whatever the input [1GB]");
  for (const char* name: {"--min-length", "--max-length", "--max-line", "--memory"})
    sub->get_option(name)->transform(CLI::AsSizeValue(true));
  sub->add_flag("--restart", o->restart, "forget an unfinished build");
  sub->footer(
    R"(.jsonl, .ndjson: a document a line. .parquet: a document a row. Other files: one document.
All may be compressed (.gz, .zst). Folders are read in the order of their paths; names that begin
with a dot and linked folders are left out. Empty texts, files that are not UTF-8 text and exact
duplicates are skipped and counted.
An interrupted build goes on when the same command is given again; the result is the same.
Example: pithtrain corpus build --out data/train --tokenizer qwen3/ --shard-size 1000000000 \
           --validation-share 0.001 --validation-out data/validation 'raw/*.jsonl.zst')");
}
}

void add_corpus_command(CLI::App& app) {
  CLI::App* corpus = app.add_subcommand("corpus", "Make corpora of text, explain them");
  corpus->require_subcommand(1);
  corpus->footer(
    "A corpus is PREFIX.bin, .idx, .json and its tokenizer in PREFIX.tokenizer/; or shards "
    "PREFIX-00000-of-0000N.*\n"
    "that PREFIX names together.\n"
    "Example: pithtrain corpus build --out data/train src/; see pithtrain corpus build --help");
  add_build_command(*corpus);

  add_inspect_command(*corpus, "inspect", "Say what a corpus is, without reading all of it", true);
  add_inspect_command(
    *corpus, "verify", "Compare every byte with the checksums, every id with the vocabulary");
  const auto [sub, o] = add_command<ShowOptions>(*corpus, "show", "Print one document", show);
  sub->add_option("corpus", o->prefix, "path without extension")->required();
  sub->add_option("document", o->document, "its number, from 0")->required();
  sub->add_flag("--ids", o->ids, "print ids, one a line");
  sub->add_flag("--tokens", o->tokens, "print a line a token: place, id, text");
  sub->add_option("--tokenizer", o->tokenizer, "instead of the one beside it");
}
}
