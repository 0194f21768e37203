// pithtrain corpus: makes corpora from text, joins and cuts them, and looks into them.
#include <CLI/CLI.hpp>
#include <regex>

#include "apps/commands.h"
#include "apps/corpus_build.h"
#include "apps/inspect.h"
#include "core/error.h"
#include "engine/batches.h"

namespace pith {
namespace {

namespace fs = std::filesystem;

struct CopyOptions {
  std::vector<std::string> inputs;
  std::string out, tokenizer;
  int64_t shard_tokens = 0;
};

// The tokenizer named, or else that beside a corpus, if there is one.
std::optional<Tokenizer> find_tokenizer(const std::string& named, const std::string& prefix) {
  if (!named.empty()) return Tokenizer::load(named);
  if (!fs::is_directory(prefix + ".tokenizer")) return std::nullopt;
  return Tokenizer::load(prefix + ".tokenizer");
}

void finish(
    CorpusWriter& writer, const CopyOptions& options, const std::optional<Tokenizer>& tokenizer) {
  if (tokenizer) tokenizer->save(options.out + ".tokenizer");
  writer.finish();
  const Corpus made(options.out);
  fmt::print("{}: {} documents, {} tokens\n", options.out, grouped(made.num_documents()),
      grouped(made.num_tokens()));
}

// merge and split: the documents of all inputs, in order, as one new corpus.
void copy_corpora(const CopyOptions& options) {
  std::vector<Corpus> corpora;
  for (const std::string& prefix : options.inputs) {
    PITH_CHECK(
        fs::absolute(prefix).lexically_normal() != fs::absolute(options.out).lexically_normal(),
        "--out is the input {}", prefix);
    corpora.emplace_back(prefix);
  }
  check_same_tokenizer(corpora);
  const Corpus& first = corpora.front();
  const auto tokenizer = find_tokenizer(options.tokenizer, first.prefix());
  const std::string hash = tokenizer ? hex(tokenizer->hash()) : first.tokenizer_hash();
  const int64_t vocab_size = tokenizer ? tokenizer->vocab_size() : first.vocab_size();
  if (vocab_size == 0)
    PITH_FAIL_HINT(
        "name its tokenizer with --tokenizer", "{} does not state its vocabulary", first.prefix());
  PITH_CHECK(first.vocab_size() == 0 || hash == first.tokenizer_hash(),
      "the tokenizer {} is not that of {}: {}", hash, first.prefix(), first.tokenizer_hash());
  CorpusWriter writer(options.out, vocab_size, hash, options.shard_tokens);
  for (const Corpus& corpus : corpora)
    for (int64_t d = 0; d < corpus.num_documents(); ++d) writer.add_document(corpus.ids(d));
  finish(writer, options, tokenizer);
}

// A view of little-endian integers.
struct NumpyArray {
  std::string_view bytes;  // begins with them
  int64_t size, width;     // elements, bytes of one
  bool is_signed;
  int64_t operator[](int64_t i) const {
    uint64_t value = 0;
    std::memcpy(&value, &bytes[static_cast<size_t>(i * width)], static_cast<size_t>(width));
    const int unused = 64 - 8 * static_cast<int>(width);
    return is_signed ? static_cast<int64_t>(value << unused) >> unused
                     : static_cast<int64_t>(value);
  }
};

// The one-dimensional array in numpy's .npy format (version 1 to 3) at the beginning of `bytes`,
// which then begins behind it.
NumpyArray read_numpy(std::string_view& bytes, const std::string& source) {
  PITH_CHECK(bytes.size() >= 12 && bytes.starts_with("\x93NUMPY"), "{}: not a numpy array", source);
  const size_t start = bytes[6] == 1 ? 10 : 12;
  const size_t length =
      start == 10 ? load<uint16_t>(bytes.data() + 8) : load<uint32_t>(bytes.data() + 8);
  PITH_CHECK(length <= 4096 && start + length <= bytes.size(),
      "{}: the header of a numpy array is damaged", source);
  const std::string header(bytes.substr(start, length));
  static const std::regex type(R"('descr': *'[<|]([iu])([1248])')"),
      shape(R"('shape': *\(([0-9]{1,18}),\))");
  std::smatch kind, count;
  PITH_CHECK(std::regex_search(header, kind, type) && std::regex_search(header, count, shape),
      "{}: {} is not a one-dimensional array of integers", source, header);
  bytes.remove_prefix(start + length);
  const NumpyArray array{bytes, std::stoll(count[1]), std::stoll(kind[2]), kind[1] == "i"};
  PITH_CHECK(array.size <= std::ssize(bytes) / array.width,
      "{}: {} elements of {} bytes do not fit the {} bytes that follow", source, array.size,
      array.width, bytes.size());
  bytes.remove_prefix(static_cast<size_t>(array.size * array.width));
  return array;
}

// Corpora of the Python program: token ids, then the ends of the documents, as two arrays.
void import_numpy(const CopyOptions& options) {
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  CorpusWriter writer(
      options.out, tokenizer.vocab_size(), hex(tokenizer.hash()), options.shard_tokens);
  for (const InputFile& input : list_inputs(options.inputs, {".bin"})) {
    const MappedFile file = map_file(input.path);
    std::string_view bytes = file.bytes();
    const NumpyArray values = read_numpy(bytes, input.path), ends = read_numpy(bytes, input.path);
    PITH_CHECK(bytes.empty(), "{}: {} bytes after its two arrays", input.path, bytes.size());
    int64_t begin = 0;
    for (int64_t d = 0; d < ends.size; ++d) {
      const int64_t end = ends[d];
      PITH_CHECK(end >= begin && end <= values.size, "{}: document {} ends at {}, not in {}..{}",
          input.path, d, end, begin, values.size);
      std::vector<int32_t> ids;
      for (; begin < end; ++begin) {
        PITH_CHECK(values[begin] >= 0 && values[begin] < tokenizer.vocab_size(),
            "{}: document {}: id {} is outside the vocabulary of {}", input.path, d, values[begin],
            tokenizer.vocab_size());
        ids.push_back(static_cast<int32_t>(values[begin]));
      }
      writer.add_document(ids);
    }
    PITH_CHECK(begin == values.size, "{}: {} tokens after the last document", input.path,
        values.size - begin);
  }
  finish(writer, options, tokenizer);
}

struct ShowOptions {
  std::string tokenizer;
  int64_t document = 0;
  bool ids = false, tokens = false;
};

// A document's text; or one line a token: place, id, text; or its ids.
void show(const std::string& prefix, const ShowOptions& options) {
  const Corpus corpus(prefix);
  const std::vector<int32_t> ids = corpus.ids(options.document);
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
  auto options = std::make_shared<CorpusBuildOptions>();
  CLI::App* command = corpus.add_subcommand("build", "Make a corpus of files of text");
  const auto size = [&](const char* name, uint64_t& value, const char* help) {
    command->add_option(name, value, help)->transform(CLI::AsSizeValue(true));
  };
  EncodeSettings& encode = options->encode;
  encode.workers = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  command->add_option("paths", options->paths, "files, globs, and folders")->required();
  command->add_option("--out", options->out, "corpus to write, without extension")->required();
  command->add_option("--tokenizer", options->tokenizer,
      "tokenizer.json or its folder; without it bytes are tokens");
  // One word: a list option would take the paths after it as well.
  command->add_option_function<std::string>(
      "--extensions",
      [options](const std::string& list) { options->endings = CLI::detail::split(list, ','); },
      "take only these from folders, e.g. .h,.jsonl.zst ('none': files without one)");
  command->add_option("--text-field", encode.read.text_field,
      "field of a JSON line or table: a.b is b inside a [text]");
  command->add_option("--id-field", encode.read.id_field, "field that names a document in reports");
  command->add_option("--end-token", options->end_token,
      "put behind each document ['' = none; the tokenizer's end of text]");
  command->add_option("--shard-size", options->shard_tokens, "tokens a shard, e.g. 1000000000")
      ->check(CLI::PositiveNumber);
  command->add_option("--seed", options->seed, "shuffle the documents");
  command->add_flag(
      "--keep-duplicates", options->keep_duplicates, "keep documents whose text came before");
  size("--min-length", encode.min_length, "skip shorter texts, bytes");
  size("--max-length", encode.max_length, "skip longer texts, bytes");
  size("--max-line", encode.read.max_line, "longer lines and files are bad [16MB]");
  size("--max-bytes", options->max_bytes, "stop before the text is longer, e.g. 20MB");
  command->add_option("--max-bad", options->max_bad, "stop after more bad lines [100]");
  auto* share = command->add_option("--validation-share", options->validation_share,
      "share of the documents held out, chosen by their content");
  share->check(CLI::Range(0.0, 1.0));
  auto* out = command->add_option(
      "--validation-out", options->validation_out, "corpus of the held-out documents");
  share->needs(out);
  out->needs(share);
  command->add_option("--workers", encode.workers, "threads that encode [all cores]")
      ->check(CLI::Range(1, 1024));
  size("--memory", options->memory, "bound, whatever the input [1GB]");
  command->add_flag("--restart", options->restart, "forget an unfinished build");
  command->footer(
      ".jsonl, .ndjson: a document a line. .parquet: a document a row. Other files: one document "
      "each. All may be\n"
      "compressed (.gz, .zst). Folders are read in the order of their paths; names that begin with "
      "a dot and linked\n"
      "folders are left out. Empty texts, files that are not UTF-8 text and exact duplicates are "
      "skipped and counted.\n"
      "An interrupted build goes on when the same command is given again; the result is the same.\n"
      "Example: pithtrain corpus build --out data/train --tokenizer qwen3/ --shard-size 1000000000 "
      "\\\n"
      "           --validation-share 0.001 --validation-out data/validation 'raw/*.jsonl.zst'");
  command->callback([options] { build_corpus(*options); });
}

}  // namespace

void add_corpus_command(CLI::App& app) {
  CLI::App* corpus =
      app.add_subcommand("corpus", "Make corpora from text, join and cut them, look into them");
  corpus->require_subcommand(1);
  corpus->footer(
      "A corpus is PREFIX.bin, .idx, .json and its tokenizer in PREFIX.tokenizer/; or shards "
      "PREFIX-00000-of-0000N.*\n"
      "that PREFIX names together.\n"
      "Example: pithtrain corpus build --out data/train src/; see pithtrain corpus build --help");
  add_build(*corpus);

  auto copy = std::make_shared<CopyOptions>();
  const auto add_copy = [&](const char* name, const char* what, auto run) {
    CLI::App* command = corpus->add_subcommand(name, what);
    command->add_option("inputs", copy->inputs)->required();
    command->add_option("--out", copy->out, "corpus to write, without extension")->required();
    command
        ->add_option(
            "--tokenizer", copy->tokenizer, "the inputs' tokenizer, where they do not state it")
        ->required(std::string_view(name) == "import");
    command->add_option("--shard-size", copy->shard_tokens, "tokens a shard")
        ->check(CLI::PositiveNumber)
        ->required(std::string_view(name) == "split");
    command->callback([copy, run] { run(*copy); });
  };
  add_copy("merge", "Join corpora of one tokenizer", copy_corpora);
  add_copy("split", "Cut corpora into shards", copy_corpora);
  add_copy("import", "Read .bin files of the Python PithTrain: two numpy arrays, ids and ends",
      import_numpy);

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
