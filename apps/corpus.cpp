// pithtrain corpus: makes corpora of text, and looks into them.
#include "apps/commands.h"
#include "engine/batches.h"
#include "text/tokenizer.h"

namespace pith {
namespace {

struct ShowOptions {
  std::string prefix, tokenizer;
  int64_t document = 0;
  bool ids = false, tokens = false;
};

// A document's text; or one line a token: place, id, text; or its ids.
void show(const ShowOptions& options) {
  const std::vector<int32_t> ids = Corpus(options.prefix).ids(options.document);
  const std::string beside = options.prefix + ".tokenizer";
  std::optional<Tokenizer> tokenizer;
  if (!options.tokenizer.empty() || fs::is_directory(beside))
    tokenizer = Tokenizer::load(options.tokenizer.empty() ? beside : options.tokenizer);
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
  CLI::App* corpus = app.add_subcommand("corpus", "Make corpora of text, explain them");
  corpus->require_subcommand(1);
  corpus->footer(
      "A corpus is PREFIX.bin, .idx, .json and its tokenizer in PREFIX.tokenizer/; or shards "
      "PREFIX-00000-of-0000N.*\n"
      "that PREFIX names together.\n"
      "Example: pithtrain corpus build --out data/train src/; see pithtrain corpus build --help");
  add_corpus_build_command(*corpus);

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
