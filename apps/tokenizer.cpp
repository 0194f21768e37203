// pithtrain tokenizer: trains tokenizers, and looks at what they make of text.
#include "text/tokenizer.h"

#include <simdjson.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <iterator>

#include "apps/commands.h"
#include "core/error.h"
#include "engine/file_io.h"
#include "text/bpe_trainer.h"

namespace pith {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string tokenizer, other, out, field = "text", pattern;
  std::vector<std::string> inputs, special;
  std::vector<int32_t> ids;
  BpeTrainerOptions train;
  EncodeOptions encode;
  bool keep_special = false, whole_files = false;
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
};

std::string read_text(const std::string& path) {
  if (path != "-") return read_file(path);
  std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  PITH_CHECK(!std::cin.bad(), "cannot read standard input");
  return text;
}

Tokenizer open(const std::string& path, const Options& options) {
  if (!path.ends_with(".tiktoken")) return Tokenizer::load(path);
  PITH_CHECK(!options.pattern.empty(), "{} has ranks only: give its regex as --pattern", path);
  std::vector<std::pair<std::string, int32_t>> special;
  for (const std::string& text : options.special) {
    const size_t cut = std::min(text.rfind('='), text.size() - 1);
    int32_t id = -1;
    PITH_CHECK(cut + 1 < text.size() && CLI::detail::lexical_cast(text.substr(cut + 1), id),
        "--special {} is not TOKEN=ID", text);
    special.emplace_back(text.substr(0, cut), id);
  }
  return Tokenizer::from_tiktoken(read_file(path), options.pattern, special);
}

std::vector<std::string> list_files(const std::vector<std::string>& inputs) {
  std::vector<std::string> files;
  for (const std::string& input : inputs) {
    if (!fs::is_directory(input)) {
      files.push_back(input);
      continue;
    }
    std::set<std::string> found;
    for (const auto& entry : fs::recursive_directory_iterator(input))
      if (entry.is_regular_file()) found.insert(entry.path().string());
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

// Calls sink(texts) with batches of about 64 MB: a field of each line of a .jsonl, else the lines
// of a file with their ends, or the file.
template <class Sink>
void for_each_batch(const Options& options, Sink sink) {
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
  for (const std::string& path : list_files(options.inputs)) {
    const std::string text = read_text(path);
    const bool json = fs::path(path).extension() == ".jsonl";
    if (options.whole_files && !json) {
      add(text);
      continue;
    }
    simdjson::dom::parser parser;
    size_t end = 0;
    for (int64_t number = 1; end < text.size(); ++number) {
      const size_t begin = end;
      end = std::min(text.find('\n', begin), text.size() - 1) + 1;
      const std::string line = text.substr(begin, end - begin);
      std::string_view value = line;
      if (json) {
        if (line.find_first_not_of(" \t\r\n") == line.npos) continue;
        const auto error = parser.parse(line)[options.field].get(value);
        PITH_CHECK(!error, "{}:{}: no text \"{}\": {}", path, number, options.field,
            simdjson::error_message(error));
      }
      add(std::string(value));
    }
  }
  if (!batch.empty()) sink(batch);
}

void run_train(Options& options) {
  PITH_CHECK(!fs::exists(fs::path(options.out) / "tokenizer.json"), "{} holds a tokenizer already",
      options.out);
  options.train.threads = options.threads;
  BpeTrainer trainer(options.train);
  int64_t bytes = 0;
  for_each_batch(options, [&](const std::vector<std::string>& texts) {
    for (const std::string& text : texts) bytes += static_cast<int64_t>(text.size());
    trainer.add(texts);
  });
  const Tokenizer tokenizer = trainer.train();
  tokenizer.save(options.out);
  fmt::print("{}: {} tokens from {:.1f} MB of text\n", options.out, tokenizer.vocab_size(),
      static_cast<double>(bytes) / 1e6);
  if (const int64_t wanted = options.train.vocab_size; tokenizer.vocab_size() < wanted)
    fmt::print("the text has no more pairs to merge; {} were asked for\n", wanted);
}

void run_encode(const Options& options) {
  const Tokenizer tokenizer = open(options.tokenizer, options);
  for (const std::string& input : options.inputs) {
    const std::string text = read_text(input);
    const Encoding encoding = tokenizer.encode(text, options.encode);
    if (!options.encode.offsets) {
      fmt::print("{}\n", fmt::join(encoding.ids, " "));
    } else {
      for (size_t i = 0; i < encoding.ids.size(); ++i)
        fmt::print("{} {} {} {}\n", encoding.ids[i], encoding.offsets[i].begin,
            encoding.offsets[i].end, tokenizer.token(encoding.ids[i]));
    }
    if (encoding.replaced_sequences > 0)
      fmt::print(stderr, "{}: {} ill-formed UTF-8 sequences were read as U+FFFD\n", input,
          encoding.replaced_sequences);
    if (encoding.dropped_characters > 0)
      fmt::print(stderr, "{}: {} characters have no token and were dropped\n", input,
          encoding.dropped_characters);
  }
}

void run_decode(Options& options) {
  const Tokenizer tokenizer = open(options.tokenizer, options);
  if (options.ids.empty()) {
    options.ids.assign(std::istream_iterator<int32_t>(std::cin), {});
    PITH_CHECK(std::cin.eof(), "standard input holds something that is not an id");
  }
  const std::string text = tokenizer.decode(options.ids, !options.keep_special);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void run_inspect(const Options& options) {
  const Tokenizer tokenizer = open(options.tokenizer, options);
  auto show = [&](const char* name, std::optional<int32_t> id) {
    if (id) fmt::print("{:14} {} {}\n", name, *id, tokenizer.token(*id));
  };
  fmt::print(
      "{:14} {}\n{:14} {:016x}\n", "vocabulary", tokenizer.vocab_size(), "hash", tokenizer.hash());
  show("bos", tokenizer.bos_id());
  show("eos", tokenizer.eos_id());
  show("pad", tokenizer.pad_id());
  if (!tokenizer.chat_template().empty())
    fmt::print("{:14} {} bytes\n", "chat template", tokenizer.chat_template().size());
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
    if (tokenizer.is_special(id)) show("special", id);
}

void run_compare(const Options& options) {
  const std::string names[2] = {options.tokenizer, options.other};
  const Tokenizer tokenizers[2] = {open(names[0], options), open(names[1], options)};
  int64_t texts_seen = 0, differ = 0, bytes = 0, tokens[2] = {0, 0};
  for_each_batch(options, [&](const std::vector<std::string>& texts) {
    std::vector<Encoding> encodings[2];
    for (int k = 0; k < 2; ++k) {
      encodings[k] = tokenizers[k].encode_batch(texts, options.threads, options.encode);
      for (const Encoding& e : encodings[k]) tokens[k] += static_cast<int64_t>(e.ids.size());
    }
    for (size_t i = 0; i < texts.size(); ++i, ++texts_seen) {
      bytes += static_cast<int64_t>(texts[i].size());
      const std::vector<int32_t>&a = encodings[0][i].ids, &b = encodings[1][i].ids;
      if (a == b || ++differ > 1) continue;
      fmt::print("first difference: text {}, token {}\n", texts_seen,
          std::ranges::mismatch(a, b).in1 - a.begin());
    }
  });
  fmt::print("{} texts, {} bytes, {} with different ids\n", texts_seen, bytes, differ);
  for (int k = 0; k < 2; ++k)
    fmt::print("{}: {} tokens, {:.3f} bytes a token\n", names[k], tokens[k],
        static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(1, tokens[k])));
  if (differ > 0) throw CLI::RuntimeError(1);
}

}  // namespace

void add_tokenizer_command(CLI::App& app) {
  auto options = std::make_shared<Options>();  // lives as long as the callbacks
  CLI::App* tokenizer = app.add_subcommand("tokenizer", "Train, use, inspect, compare tokenizers.");
  tokenizer->require_subcommand(1);
  auto command = [&](const char* name, const char* help, auto run) {
    CLI::App* sub = tokenizer->add_subcommand(name, help);
    sub->callback([options, run] { run(*options); });
    return sub;
  };
  auto add_tokenizer = [&](CLI::App* sub) {
    sub->add_option("tokenizer", options->tokenizer,
           "tokenizer.json, the folder of one, or a .tiktoken file")
        ->required();
    sub->add_option("--pattern", options->pattern, ".tiktoken: regex that cuts text into pieces");
    sub->add_option("--special", options->special, ".tiktoken: a special token as TOKEN=ID")
        ->allow_extra_args(false);
  };
  auto add_inputs = [&](CLI::App* sub) {
    sub->add_option("inputs", options->inputs, "Files and folders: text, or .jsonl")->required();
    sub->add_option("--field", options->field, "Field of a JSON line or table [text]");
    sub->add_flag("--whole-files", options->whole_files, "A file is one text, not one a line");
    sub->add_option("--threads", options->threads, "[all cores]")->check(CLI::Range(1, 1024));
  };
  auto add_encoding = [&](CLI::App* sub) {
    EncodeOptions& encode = options->encode;
    sub->add_flag("!--no-special", encode.add_special_tokens, "Add no start or end tokens");
    sub->add_flag("!--plain", encode.parse_special, "Special tokens in the text are plain text");
    sub->add_flag("--strict", encode.strict, "Refuse text that is not UTF-8");
  };

  CLI::App* train = command("train", "Learn a byte-level BPE from text.", run_train);
  add_inputs(train);
  train->add_option("--out", options->out, "Folder for tokenizer.json")->required();
  train->add_option("--vocab-size", options->train.vocab_size, "Tokens, bytes included [8192]");
  train->add_option("--min-frequency", options->train.min_frequency, "Rarer pairs stay apart [0]");
  train->add_option("--pattern", options->train.pattern, "Regex that cuts text into pieces");
  train->add_option("--special", options->train.special_tokens,
      "Special tokens, ids from 0; the first ends a text [<|endoftext|>]");

  CLI::App* encode = command("encode", "Print the ids of a text.", run_encode);
  add_tokenizer(encode);
  encode->add_option("inputs", options->inputs, "Text files, - for standard input")
      ->default_val(std::vector<std::string>{"-"});
  encode->add_flag("--offsets", options->encode.offsets, "One token a line: id, bytes, token");
  add_encoding(encode);

  CLI::App* decode = command("decode", "Print the text of ids.", run_decode);
  add_tokenizer(decode);
  decode->add_option("ids", options->ids, "Token ids [standard input]");
  decode->add_flag("--keep-special", options->keep_special, "Spell special tokens, too");

  add_tokenizer(command("inspect", "Print sizes and special tokens.", run_inspect));

  CLI::App* compare = command("compare", "Are the ids of two tokenizers equal?", run_compare);
  add_tokenizer(compare);
  compare->add_option("other", options->other, "The other tokenizer")->required();
  add_inputs(compare);
  add_encoding(compare);
}

}  // namespace pith
