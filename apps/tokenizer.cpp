// pithtrain tokenizer: trains tokenizers, and looks at what they make of text.
#include "text/tokenizer.h"

#include "apps/commands.h"
#include "engine/file_io.h"
#include "text/corpus_reader.h"

namespace pith {
namespace {

struct Options {
  std::string tokenizer, other, out, field = "text";
  std::vector<std::string> inputs;
  std::vector<int32_t> ids;
  BpeTrainerOptions train;
  EncodeOptions encode;
  bool keep_special = false, whole_files = false;
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
};

// Calls sink(texts) with batches of about 64 MB: the documents of JSON lines and tables, of other
// files their lines with the line ends, or the whole.
template <class Sink> void for_each_batch(const Options& options, Sink sink) {
  std::vector<std::string> batch;
  size_t bytes = 0;
  auto add = [&](std::string text) {
    bytes += text.size();
    batch.push_back(std::move(text));
    if (bytes < (64u << 20)) return;
    sink(batch);
    batch.clear();
    bytes = 0;
  };
  const ReadOptions read{.text_field = options.field, .max_line = UINT64_MAX};
  InputReader reader(list_inputs(options.inputs, {}), read);
  for (Chunk chunk; reader.next(chunk);) {
    read_lines(chunk, read);
    for (const Document& document : chunk.documents) {
      PITH_CHECK(
          document.problem.empty(), "{}:{}: {}", chunk.path, document.line, document.problem);
      const std::string& text = document.text;
      const bool whole = options.whole_files || document.line > 0;
      for (size_t begin = 0, end; begin < text.size(); begin = end) {
        end = std::min(whole ? text.npos : text.find('\n', begin), text.size() - 1) + 1;
        add(text.substr(begin, end - begin));
      }
    }
  }
  if (!batch.empty()) sink(batch);
}

void run_train(Options& options) {
  PITH_CHECK(!fs::exists(fs::path(options.out) / "tokenizer.json"), "{} holds a tokenizer already",
      options.out);
  options.train.threads = options.threads;
  BpeTrainer trainer(options.train);
  size_t bytes = 0;
  for_each_batch(options, [&](const std::vector<std::string>& texts) {
    for (const std::string& text : texts) bytes += text.size();
    trainer.add(texts);
  });
  const Tokenizer tokenizer = trainer.train();
  tokenizer.save(options.out);
  fmt::print("{}: {} tokens from {:.1f} MB of text\n", options.out, tokenizer.vocab_size(),
      real(bytes) / 1e6);
  if (const int64_t wanted = options.train.vocab_size; tokenizer.vocab_size() < wanted)
    fmt::print("the text has no more pairs to merge; {} were asked for\n", wanted);
}

void run_encode(const Options& options) {
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  for (const std::string& input : options.inputs) {
    const auto text =
        input != "-" ? read_file(input) : std::string{std::istreambuf_iterator<char>(std::cin), {}};
    PITH_CHECK(!std::cin.bad(), "cannot read standard input");
    const Encoding encoding = tokenizer.encode(text, options.encode);
    if (!options.encode.offsets)
      fmt::print("{}\n", fmt::join(encoding.ids, " "));
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
  const std::string text = tokenizer.decode(options.ids, !options.keep_special);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void run_inspect(const Options& options) {
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  auto show = [&](const char* name, std::optional<int32_t> id) {
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

void run_compare(const Options& options) {
  const std::string names[2] = {options.tokenizer, options.other};
  const Tokenizer tokenizers[2] = {Tokenizer::load(names[0]), Tokenizer::load(names[1])};
  size_t texts_seen = 0, differ = 0, bytes = 0, tokens[2] = {0, 0};
  for_each_batch(options, [&](const std::vector<std::string>& texts) {
    std::vector<Encoding> encodings[2];
    for (int k = 0; k < 2; ++k) {
      encodings[k] = tokenizers[k].encode_batch(texts, options.threads, options.encode);
      for (const Encoding& e : encodings[k]) tokens[k] += e.ids.size();
    }
    for (size_t i = 0; i < texts.size(); ++i, ++texts_seen) {
      bytes += texts[i].size();
      const std::vector<int32_t>&a = encodings[0][i].ids, &b = encodings[1][i].ids;
      if (a == b || ++differ > 1) continue;
      fmt::print("first difference: text {}, token {}\n", texts_seen,
          std::ranges::mismatch(a, b).in1 - a.begin());
    }
  });
  fmt::print("{} texts, {} bytes, {} with different ids\n", texts_seen, bytes, differ);
  for (int k = 0; k < 2; ++k)
    fmt::print("{}: {} tokens, {:.3f} bytes a token\n", names[k], tokens[k],
        real(bytes) / real(std::max<size_t>(1, tokens[k])));
  if (differ > 0) throw CLI::RuntimeError(1);
}

}  // namespace

void add_tokenizer_command(CLI::App& app) {
  CLI::App& all = *app.add_subcommand("tokenizer", "Train, use, inspect, compare tokenizers.");
  all.require_subcommand(1);
  const auto add_tokenizer = [](CLI::App* sub, Options* o) {
    sub->add_option("tokenizer", o->tokenizer, "tokenizer.json or its folder")->required();
  };
  const auto add_inputs = [](CLI::App* sub, Options* o) {
    sub->add_option(
           "inputs", o->inputs, "Files, globs, folders: text, .jsonl, .parquet; also .gz, .zst")
        ->required();
    sub->add_option("--field", o->field, "Field of a JSON line or table [text]");
    sub->add_flag("--whole-files", o->whole_files, "A file is one text, not one a line");
    sub->add_option("--threads", o->threads, "[all cores]")->check(CLI::Range(1, 1024));
  };
  const auto add_encoding = [](CLI::App* sub, EncodeOptions& encode) {
    sub->add_flag("!--no-special", encode.add_special_tokens, "Add no start or end tokens");
    sub->add_flag("!--plain", encode.parse_special, "Special tokens in the text are plain text");
    sub->add_flag("--strict", encode.strict, "Refuse text that is not UTF-8");
  };

  auto [sub, o] =
      add_command<Options>(all, "train", "Learn a byte-level BPE from text.", run_train);
  add_inputs(sub, o);
  sub->add_option("--out", o->out, "Folder for tokenizer.json")->required();
  sub->add_option("--vocab-size", o->train.vocab_size, "Tokens, bytes included [8192]");
  sub->add_option("--min-frequency", o->train.min_frequency, "Rarer pairs stay apart [0]");
  sub->add_option("--pattern", o->train.pattern, "Regex that cuts text into pieces");
  sub->add_option("--special", o->train.special_tokens,
      "Special tokens, ids from 0; the first ends a text [<|endoftext|>]");

  std::tie(sub, o) = add_command<Options>(all, "encode", "Print the ids of a text.", run_encode);
  add_tokenizer(sub, o);
  sub->add_option("inputs", o->inputs, "Text files, - for standard input")
      ->default_val(std::vector<std::string>{"-"});
  sub->add_flag("--offsets", o->encode.offsets, "One token a line: id, bytes, token");
  add_encoding(sub, o->encode);

  std::tie(sub, o) = add_command<Options>(all, "decode", "Print the text of ids.", run_decode);
  add_tokenizer(sub, o);
  sub->add_option("ids", o->ids, "Token ids [standard input]");
  sub->add_flag("--keep-special", o->keep_special, "Spell special tokens, too");

  std::tie(sub, o) =
      add_command<Options>(all, "inspect", "Print sizes and special tokens.", run_inspect);
  add_tokenizer(sub, o);

  std::tie(sub, o) =
      add_command<Options>(all, "compare", "Are the ids of two tokenizers equal?", run_compare);
  add_tokenizer(sub, o);
  sub->add_option("other", o->other, "The other tokenizer")->required();
  add_inputs(sub, o);
  add_encoding(sub, o->encode);
}

}  // namespace pith
