// pithtrain corpus: makes corpora from text, and looks into them.
#include <simdjson.h>
#include <xxhash.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "apps/commands.h"
#include "apps/inspect.h"
#include "engine/corpus.h"
#include "engine/file_io.h"
#include "text/tokenizer.h"

namespace pith {
namespace {

namespace fs = std::filesystem;

struct BuildOptions {
  std::vector<std::string> paths, extensions;
  std::string out, validation_out, tokenizer;
  uint64_t max_bytes = 0;
  double validation_share = 0;
};

// --- reading: from paths to texts ---

// Files below `folder` in the order of their relative paths' bytes. Left out: names that begin with
// a dot, linked folders (loops), and what is not a file. Links to files count as files.
std::vector<fs::path> files_below(
    const fs::path& folder, const std::vector<std::string>& extensions) {
  std::vector<fs::path> found;
  for (auto entry = fs::recursive_directory_iterator(folder);
      entry != fs::recursive_directory_iterator(); ++entry) {
    if (entry->path().filename().string().starts_with('.')) {
      entry.disable_recursion_pending();
      continue;
    }
    const std::string extension = entry->path().extension().string();
    const bool wanted =
        extensions.empty() || std::find(extensions.begin(), extensions.end(),
                                  extension.empty() ? "none" : extension) != extensions.end();
    if (wanted && entry->is_regular_file()) found.push_back(entry->path());
  }
  std::sort(found.begin(), found.end(),
      [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  return found;
}

std::vector<fs::path> list_files(const BuildOptions& options) {
  std::vector<fs::path> files;
  for (const std::string& path : options.paths) {
    PITH_CHECK(fs::exists(path), "{} does not exist", path);
    if (!fs::is_directory(path)) {
      files.emplace_back(path);  // named singly: whatever its extension
      continue;
    }
    for (fs::path& file : files_below(path, options.extensions)) files.push_back(std::move(file));
  }
  return files;
}

// Which texts become documents, and why the others do not.
class TextFilter {
 public:
  bool accepts(std::string_view text) {
    if (text.empty()) return ++empty, false;
    if (text.find('\0') != text.npos || !simdjson::validate_utf8(text.data(), text.size()))
      return ++not_text, false;
    const XXH128_hash_t sum = XXH3_128bits(text.data(), text.size());
    if (!seen_.insert({sum.high64, sum.low64}).second) return ++duplicates, false;
    return true;
  }
  int64_t empty = 0, not_text = 0, duplicates = 0;

 private:
  std::set<std::pair<uint64_t, uint64_t>> seen_;
};

// --- encoding and writing ---

class SplitWriter {
 public:
  SplitWriter(const std::string& prefix, const Tokenizer& tokenizer)
      : prefix_(prefix),
        tokenizer_(tokenizer),
        writer_(prefix, tokenizer.vocab_size(), hex(tokenizer.hash())) {
    PITH_CHECK(tokenizer.eos_id(), "this tokenizer has no end token to end documents with");
  }
  void add(std::string_view text) {
    EncodeOptions options;
    options.add_special_tokens = false;
    options.parse_special = false;  // a text that spells <|endoftext|> does not end there
    options.strict = true;
    std::vector<int32_t> ids = tokenizer_.encode(text, options).ids;
    ids.push_back(*tokenizer_.eos_id());
    writer_.add_document(ids);
    ++documents_;
    bytes_ += text.size();
    tokens_ += static_cast<int64_t>(ids.size());
  }
  void finish(const char* name, const char* advice) {
    if (documents_ == 0) PITH_FAIL_HINT(advice, "no document for {}", prefix_);
    writer_.finish();
    tokenizer_.save(prefix_ + ".tokenizer");
    fmt::print("{:<11} {} documents, {} of text, {} tokens -> {}.bin, .idx, .json\n", name,
        grouped(documents_), human_bytes(bytes_), grouped(tokens_), prefix_);
  }

 private:
  std::string prefix_;
  Tokenizer tokenizer_;
  CorpusWriter writer_;
  int64_t documents_ = 0, tokens_ = 0;
  uint64_t bytes_ = 0;
};

// The share of documents that go to validation depends on a document's content alone: a document
// stays on its side when files are added, moved or renamed.
bool for_validation(std::string_view text, double share) {
  return static_cast<double>(xxh3(text) >> 11) * 0x1p-53 < share;
}

void build(const BuildOptions& options) {
  const Tokenizer tokenizer =
      options.tokenizer.empty() ? Tokenizer::bytes() : Tokenizer::load(options.tokenizer);
  SplitWriter train(options.out, tokenizer);
  std::optional<SplitWriter> validation;
  if (!options.validation_out.empty()) {
    PITH_CHECK(fs::absolute(options.validation_out).lexically_normal() !=
                   fs::absolute(options.out).lexically_normal(),
        "--out and --validation-out are the same: {}", options.out);
    validation.emplace(options.validation_out, tokenizer);
  }
  const std::vector<fs::path> files = list_files(options);
  TextFilter filter;
  uint64_t bytes = 0;
  size_t read = 0;
  bool full = false;
  for (; read < files.size() && !full; ++read) {
    const MappedFile file = map_file(files[read]);
    const std::string_view text = file.bytes();
    full = options.max_bytes > 0 && bytes + text.size() > options.max_bytes;
    if (full || !filter.accepts(text)) continue;
    bytes += text.size();
    (validation && for_validation(text, options.validation_share) ? *validation : train).add(text);
  }
  train.finish("train", "look at PATH and --extensions");
  if (validation) validation->finish("validation", "raise --validation-share");
  fmt::print("{:<11} {} files: {} duplicates, {} empty, {} not UTF-8 text\n", "skipped",
      grouped(filter.duplicates + filter.empty + filter.not_text), grouped(filter.duplicates),
      grouped(filter.empty), grouped(filter.not_text));
  if (full)
    fmt::print("{:<11} {} of {} files read; the next would pass --max-bytes\n", "stopped",
        grouped(static_cast<int64_t>(read) - 1), grouped(static_cast<int64_t>(files.size())));
}

// The tokenizer beside a corpus, if there is one.
std::optional<Tokenizer> find_tokenizer(const std::string& named, const std::string& prefix) {
  if (!named.empty()) return Tokenizer::load(named);
  if (!fs::is_directory(prefix + ".tokenizer")) return std::nullopt;
  return Tokenizer::load(prefix + ".tokenizer");
}

struct ShowOptions {
  std::string tokenizer;
  int64_t document = 0;
  bool ids = false, tokens = false;
};

// A document's text; or one line a token: place, id, text; or its ids.
void show(const std::string& prefix, const ShowOptions& options) {
  const Corpus corpus(prefix);
  const std::vector<int32_t> ids = document_ids(corpus, options.document);
  const auto tokenizer = find_tokenizer(options.tokenizer, prefix);
  PITH_CHECK(
      tokenizer || !options.tokens, "{} has no tokenizer beside it: give --tokenizer", prefix);
  if (options.ids || !tokenizer) {
    for (const int32_t id : ids) fmt::print("{}\n", id);
  } else if (options.tokens) {
    for (size_t i = 0; i < ids.size(); ++i)
      fmt::print("{} {} {:?}\n", i, ids[i],
          tokenizer->is_special(ids[i]) ? tokenizer->token(ids[i])
                                        : tokenizer->decode(std::span(ids).subspan(i, 1)));
  } else {
    const std::string text = tokenizer->decode(ids);
    std::fwrite(text.data(), 1, text.size(), stdout);
  }
}

void add_build(CLI::App& corpus) {
  auto options = std::make_shared<BuildOptions>();
  CLI::App* command =
      corpus.add_subcommand("build", "Make a corpus of files of text, one document a file");
  command->add_option("paths", options->paths, "files, and folders whose files are taken")
      ->required();
  command->add_option("--out", options->out, "corpus to write, without extension")->required();
  command->add_option("--tokenizer", options->tokenizer,
      "tokenizer.json or its folder; without it bytes are tokens");
  // One word: a list option would take the paths after it as well.
  command->add_option_function<std::string>(
      "--extensions",
      [options](const std::string& list) { options->extensions = CLI::detail::split(list, ','); },
      "take only these from folders, e.g. .h,.hpp ('none': files without one)");
  command
      ->add_option("--max-bytes", options->max_bytes, "stop before the text is longer, e.g. 20MB")
      ->transform(CLI::AsSizeValue(true));
  auto* share = command->add_option("--validation-share", options->validation_share,
      "share of the documents held out, chosen by their content");
  share->check(CLI::Range(0.0, 1.0));
  auto* out = command->add_option(
      "--validation-out", options->validation_out, "corpus of the held-out documents");
  share->needs(out);
  out->needs(share);
  command->footer(
      "Folders are read in the order of their paths; names that begin with a dot and linked "
      "folders are left\n"
      "out. Empty files, files that are not UTF-8 text and exact duplicates are skipped and "
      "counted.\n"
      "Example: pithtrain corpus build --out data/train --extensions .h,.hpp --max-bytes 20MB \\\n"
      "           --validation-share 0.02 --validation-out data/validation /usr/include");
  command->callback([options] { build(*options); });
}

}  // namespace

void add_corpus_command(CLI::App& app) {
  CLI::App* corpus = app.add_subcommand("corpus", "Make corpora from text, and look into them");
  corpus->require_subcommand(1);
  corpus->footer(
      "A corpus is PREFIX.bin, .idx, .json and its tokenizer in PREFIX.tokenizer/.\n"
      "Example: pithtrain corpus build --out data/train src/; see pithtrain corpus build --help");
  add_build(*corpus);

  auto prefix = std::make_shared<std::string>();
  const auto add = [&](const char* name, const char* what) {
    CLI::App* command = corpus->add_subcommand(name, what);
    command->add_option("corpus", *prefix, "path without extension")->required();
    return command;
  };
  add("inspect", "Say what a corpus is, without reading all of it")->callback([prefix] {
    report_damage(describe_corpus(*prefix, true));
  });
  add("verify", "Compare every byte with the checksums, every id with the vocabulary")
      ->callback([prefix] { report_damage(describe_corpus(*prefix, false)); });
  CLI::App* show_command = add("show", "Print one document");
  auto options = std::make_shared<ShowOptions>();
  show_command->add_option("document", options->document, "its number, from 0")->required();
  show_command->add_flag("--ids", options->ids, "print ids, one a line");
  show_command->add_flag("--tokens", options->tokens, "print a line a token: place, id, text");
  show_command->add_option("--tokenizer", options->tokenizer, "instead of the one beside it");
  show_command->callback([prefix, options] { show(*prefix, *options); });
}

}  // namespace pith
