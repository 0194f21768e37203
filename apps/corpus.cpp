// pithtrain corpus: makes corpora from text, joins and cuts them, and looks into them.
#include "apps/commands.h"
#include "engine/batches.h"
#include "text/tokenizer.h"

namespace pith {
namespace {

struct CopyOptions {
  std::vector<std::string> inputs;
  std::string out, tokenizer;
  int64_t shard_tokens = 0;
};

// The tokenizer named, or that beside a corpus, if any.
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
    PITH_CHECK(!same_place(prefix, options.out), "--out is the input {}", prefix);
    corpora.emplace_back(prefix);
  }
  check_same_tokenizer(corpora);
  const Corpus& first = corpora.front();
  const auto tokenizer = find_tokenizer(options.tokenizer, first.prefix());
  const std::string hash = tokenizer ? hex(tokenizer->hash()) : first.tokenizer_hash();
  const int64_t vocab_size = tokenizer ? tokenizer->vocab_size() : first.vocab_size();
  if (vocab_size == 0)
    PITH_FAIL_HINT("give its --tokenizer", "{} does not state its vocabulary", first.prefix());
  PITH_CHECK(first.vocab_size() == 0 || hash == first.tokenizer_hash(),
      "the tokenizer {} is not that of {}: {}", hash, first.prefix(), first.tokenizer_hash());
  CorpusWriter writer(options.out, vocab_size, hash, options.shard_tokens);
  for (const Corpus& corpus : corpora)
    for (int64_t d = 0; d < corpus.num_documents(); ++d) writer.add_document(corpus.ids(d));
  finish(writer, options, tokenizer);
}

struct ShowOptions {
  std::string prefix, tokenizer;
  int64_t document = 0;
  bool ids = false, tokens = false;
};

// A document's text; or one line a token: place, id, text; or its ids.
void show(const ShowOptions& options) {
  const std::vector<int32_t> ids = Corpus(options.prefix).ids(options.document);
  const auto tokenizer = find_tokenizer(options.tokenizer, options.prefix);
  PITH_CHECK(tokenizer || !options.tokens, "{} has no tokenizer: give --tokenizer", options.prefix);
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

}  // namespace

void add_corpus_command(CLI::App& app) {
  CLI::App* corpus = app.add_subcommand("corpus", "Make corpora of text, join, cut, explain them");
  corpus->require_subcommand(1);
  corpus->footer(
      "A corpus is PREFIX.bin, .idx, .json and its tokenizer in PREFIX.tokenizer/; or shards "
      "PREFIX-00000-of-0000N.*\n"
      "that PREFIX names together.\n"
      "Example: pithtrain corpus build --out data/train src/; see pithtrain corpus build --help");
  add_corpus_build_command(*corpus);

  const auto add_copy = [&](const std::string& name, const char* what, auto run) {
    const auto [sub, o] = add_command<CopyOptions>(*corpus, name, what, run);
    sub->add_option("inputs", o->inputs)->required();
    sub->add_option("--out", o->out, "corpus to write, without extension")->required();
    sub->add_option("--tokenizer", o->tokenizer, "that of the inputs, if they do not state it");
    sub->add_option("--shard-size", o->shard_tokens, "tokens a shard")
        ->check(CLI::PositiveNumber)
        ->required(name == "split");
  };
  add_copy("merge", "Join corpora of one tokenizer", copy_corpora);
  add_copy("split", "Cut corpora into shards", copy_corpora);

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

}  // namespace pith
