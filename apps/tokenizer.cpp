// pithtrain tokenizer: trains tokenizers, and looks at what they make of text.
#include "text/tokenizer.h"
#include "apps/commands.h"
#include "engine/file_io.h"
#include "text/corpus_reader.h"

namespace pith {
namespace {
struct TrainOptions : BpeTrainerOptions {
  string out;
  vector<string> inputs;
  ReadOptions read{.max_line = UINT64_MAX};
  bool whole_files = false;
};

struct Options {
  string tokenizer;
  vector<string> inputs{"-"};
  vector<int32_t> ids;
  EncodeOptions encode;
  bool keep_special = false;
};

// The texts are the documents of JSON lines and tables, of other files their lines with the line
// ends, or the whole. About 64 MB of them are counted at once.
void run_train(const TrainOptions& options) {
  PITH_CHECK(!fs::exists(fs::path(options.out) / "tokenizer.json"), "{} holds a tokenizer already",
    options.out);
  BpeTrainer trainer(options);
  InputReader reader(list_inputs(options.inputs, {}), options.read);
  vector<string> batch;
  size_t bytes = 0, batch_bytes = 0;
  for (bool more = true; more;) {
    Chunk chunk;
    more = reader.next(chunk);
    read_lines(chunk, options.read);
    for (const Document& document: chunk.documents) {
      PITH_CHECK(
        document.problem.empty(), "{}:{}: {}", chunk.path, document.line, document.problem);
      const string& text = document.text;
      const bool whole = options.whole_files || document.line > 0;
      for (size_t begin = 0, end; begin < text.size(); begin = end) {
        end = min(whole ? text.npos : text.find('\n', begin), text.size() - 1) + 1;
        batch.push_back(text.substr(begin, end - begin));
      }
      batch_bytes += text.size();
    }
    if (more && batch_bytes < (64u << 20)) continue;
    trainer.add(batch);
    batch.clear();
    bytes += exchange(batch_bytes, 0);
  }
  const Tokenizer tokenizer = trainer.train();
  tokenizer.save(options.out);
  fmt::print("{}: {} tokens from {:.1f} MB of text\n", options.out, tokenizer.vocab_size(),
    real(bytes) / 1e6);
  if (tokenizer.vocab_size() < options.vocab_size)
    fmt::print("the text has no more pairs to merge; {} were asked for\n", options.vocab_size);
}

void run_encode(const Options& options) {
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  for (const string& input: options.inputs) {
    const auto text =
      input != "-" ? read_file(input) : string{std::istreambuf_iterator<char>(std::cin), {}};
    PITH_CHECK(!std::cin.bad(), "cannot read standard input");
    const Encoding encoding = tokenizer.encode(text, options.encode);
    if (!options.encode.offsets) fmt::print("{}\n", fmt::join(encoding.ids, " "));
    else
      for (size_t i = 0; i < encoding.ids.size(); ++i)
        fmt::print("{} {} {} {}\n", encoding.ids[i], encoding.offsets[i].begin,
          encoding.offsets[i].end, tokenizer.token(encoding.ids[i]));
    if (encoding.replaced_sequences > 0)
      fmt::print(stderr, "{}: {} ill-formed UTF-8 sequences were read as U+FFFD\n", input,
        encoding.replaced_sequences);
    if (encoding.dropped_characters > 0)
      fmt::print(stderr, "{}: {} characters have no token and were dropped\n", input,
        encoding.dropped_characters);
  }
}

void run_decode(Options& options) {
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  if (options.ids.empty()) {
    options.ids.assign(std::istream_iterator<int32_t>(std::cin), {});
    PITH_CHECK(std::cin.eof(), "standard input holds something that is not an id");
  }
  const string text = tokenizer.decode(options.ids, !options.keep_special);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void run_inspect(const Options& options) {
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  auto show = [&](const char* name, optional<int32_t> id) {
    if (id) fmt::print("{:14} {} {}\n", name, *id, tokenizer.token(*id));
  };
  fmt::print(
    "vocabulary     {}\nhash           {:016x}\n", tokenizer.vocab_size(), tokenizer.hash());
  show("bos", tokenizer.bos_id());
  show("eos", tokenizer.eos_id());
  show("pad", tokenizer.pad_id());
  if (!tokenizer.chat_template().empty())
    fmt::print("chat template  {} bytes\n", tokenizer.chat_template().size());
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
    if (tokenizer.is_special(id)) show("special", id);
}
}

void add_tokenizer_command(CLI::App& app) {
  CLI::App& all = *app.add_subcommand("tokenizer", "Train, use, inspect tokenizers.");
  all.require_subcommand(1);
  const auto [train, t] =
    add_command<TrainOptions>(all, "train", "Learn a byte-level BPE from text.", run_train);
  t->threads = int(max(1u, thread::hardware_concurrency()));
  train
    ->add_option(
      "inputs", t->inputs, "Files, globs, folders: text, .jsonl, .parquet; also .gz, .zst")
    ->required();
  train->add_option("--field", t->read.text_field, "Field of a JSON line or table [text]");
  train->add_flag("--whole-files", t->whole_files, "A file is one text, not one a line");
  train->add_option("--threads", t->threads, "[all cores]")->check(CLI::Range(1, 1024));
  train->add_option("--out", t->out, "Folder for tokenizer.json")->required();
  train->add_option("--vocab-size", t->vocab_size, "Tokens, bytes included [8192]");
  train->add_option("--min-frequency", t->min_frequency, "Rarer pairs stay apart [0]");
  train->add_option("--pattern", t->pattern, "Regex that cuts text into pieces");
  train->add_option("--special", t->special_tokens,
    "Special tokens, ids from 0; the first ends a text [<|endoftext|>]");

  const auto add = [&](const char* name, const char* what, auto run) {
    const auto added = add_command<Options>(all, name, what, run);
    added.first->add_option("tokenizer", added.second->tokenizer, "tokenizer.json or its folder")
      ->required();
    return added;
  };
  const auto [encode, e] = add("encode", "Print the ids of a text.", run_encode);
  encode->add_option("inputs", e->inputs, "Text files, - for standard input [-]");
  encode->add_flag("--offsets", e->encode.offsets, "One token a line: id, bytes, token");
  encode->add_flag("!--no-special", e->encode.add_special_tokens, "Add no start or end tokens");
  encode->add_flag(
    "!--plain", e->encode.parse_special, "Special tokens in the text are plain text");
  encode->add_flag("--strict", e->encode.strict, "Refuse text that is not UTF-8");

  const auto [decode, d] = add("decode", "Print the text of ids.", run_decode);
  decode->add_option("ids", d->ids, "Token ids [standard input]");
  decode->add_flag("--keep-special", d->keep_special, "Spell special tokens, too");

  add("inspect", "Print sizes and special tokens.", run_inspect);
}
}
