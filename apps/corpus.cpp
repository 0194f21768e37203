// pithtrain corpus: makes corpora from text, and looks into them.
#include <simdjson.h>
#include <xxhash.h>

#include <CLI/CLI.hpp>

#include "apps/commands.h"
#include "apps/inspect.h"
#include "core/error.h"
#include "engine/corpus.h"
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

// The files named, and those below the folders named in the order of their relative paths' bytes.
// Left out there: other extensions, names that begin with a dot, linked folders (loops), and what
// is not a file. Links to files count as files.
std::vector<fs::path> list_files(const BuildOptions& options) {
  std::vector<fs::path> files;
  for (const std::string& path : options.paths) {
    PITH_CHECK(fs::exists(path), "{} does not exist", path);
    if (!fs::is_directory(path)) {
      files.emplace_back(path);
      continue;
    }
    std::vector<fs::path> found;
    for (auto entry = fs::recursive_directory_iterator(path); entry != end(entry); ++entry) {
      const std::string extension = entry->path().extension().string();
      const bool wanted =
          options.extensions.empty() ||
          std::ranges::count(options.extensions, extension.empty() ? "none" : extension) > 0;
      if (entry->path().filename().string().starts_with('.')) {
        entry.disable_recursion_pending();
      } else if (wanted && entry->is_regular_file()) {
        found.push_back(entry->path());
      }
    }
    std::ranges::sort(found, {}, &fs::path::native);
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

class SplitWriter {
 public:
  SplitWriter(const std::string& prefix, const Tokenizer& tokenizer)
      : prefix_(prefix),
        tokenizer_(tokenizer),
        writer_(prefix, tokenizer.vocab_size(), hex(tokenizer.hash())) {
    PITH_CHECK(tokenizer.eos_id(), "this tokenizer has no end token to end documents with");
  }
  void add(std::string_view text) {
    // A text that spells <|endoftext|> does not end there.
    std::vector<int32_t> ids =
        tokenizer_
            .encode(text, {.add_special_tokens = false, .parse_special = false, .strict = true})
            .ids;
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
  int64_t empty = 0, not_text = 0, duplicates = 0;
  std::set<std::pair<uint64_t, uint64_t>> seen;
  const auto accepts = [&](std::string_view text) {
    if (text.empty()) return ++empty, false;
    if (text.find('\0') != text.npos || !simdjson::validate_utf8(text.data(), text.size()))
      return ++not_text, false;
    const XXH128_hash_t sum = XXH3_128bits(text.data(), text.size());
    return seen.insert({sum.high64, sum.low64}).second || (++duplicates, false);
  };
  uint64_t bytes = 0;
  size_t read = 0;
  bool full = false;
  for (; read < files.size() && !full; ++read) {
    const MappedFile file = map_file(files[read]);
    const std::string_view text = file.bytes();
    full = options.max_bytes > 0 && bytes + text.size() > options.max_bytes;
    if (full || !accepts(text)) continue;
    bytes += text.size();
    // By its content alone: a document stays on its side when files are added, moved or renamed.
    const double place = static_cast<double>(xxh3(text) >> 11) * 0x1p-53;
    (validation && place < options.validation_share ? *validation : train).add(text);
  }
  train.finish("train", "look at PATH and --extensions");
  if (validation) validation->finish("validation", "raise --validation-share");
  fmt::print("{:<11} {} files: {} duplicates, {} empty, {} not UTF-8 text\n", "skipped",
      grouped(duplicates + empty + not_text), grouped(duplicates), grouped(empty),
      grouped(not_text));
  if (full)
    fmt::print("{:<11} {} of {} files read; the next would pass --max-bytes\n", "stopped",
        grouped(static_cast<int64_t>(read) - 1), grouped(static_cast<int64_t>(files.size())));
}

struct ShowOptions {
  std::string tokenizer;
  int64_t document = 0;
  bool ids = false, tokens = false;
};

// A document's text; or one line a token: place, id, text; or its ids.
void show(const std::string& prefix, const ShowOptions& options) {
  const Corpus corpus(prefix);
  std::vector<int64_t> wide(static_cast<size_t>(corpus.length(options.document)));
  corpus.read(options.document, 0, wide);
  const std::vector<int32_t> ids(wide.begin(), wide.end());
  const std::string beside = prefix + ".tokenizer";
  std::optional<Tokenizer> tokenizer;
  if (!options.tokenizer.empty() || fs::is_directory(beside))
    tokenizer = Tokenizer::load(options.tokenizer.empty() ? beside : options.tokenizer);
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
    inspect_corpus(*prefix, true);
  });
  add("verify", "Compare every byte with the checksums, every id with the vocabulary")
      ->callback([prefix] { inspect_corpus(*prefix, false); });
  CLI::App* show_command = add("show", "Print one document");
  auto options = std::make_shared<ShowOptions>();
  show_command->add_option("document", options->document, "its number, from 0")->required();
  show_command->add_flag("--ids", options->ids, "print ids, one a line");
  show_command->add_flag("--tokens", options->tokens, "print a line a token: place, id, text");
  show_command->add_option("--tokenizer", options->tokenizer, "instead of the one beside it");
  show_command->callback([prefix, options] { show(*prefix, *options); });
}

}  // namespace pith
