// pithtrain corpus: makes corpora from text, joins and cuts them, and looks into them.
#include <ATen/ops/from_blob.h>

#include "apps/commands.h"
#include "engine/batches.h"
#include "text/corpus_reader.h"
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

// A view of the one-dimensional array (.npy, version 1 to 3) that begins `bytes`, and is cut off.
Tensor read_numpy(std::string_view& bytes, const std::string& source) {
  PITH_CHECK(bytes.size() >= 12 && bytes.starts_with("\x93NUMPY"), "{}: not a numpy array", source);
  const size_t start = bytes[6] == 1 ? 10 : 12;
  const char* at = bytes.data() + 8;
  const size_t size = start == 10 ? load<uint16_t>(at) : load<uint32_t>(at);
  PITH_CHECK(size <= 4096 && start + size <= bytes.size(), "{}: a damaged numpy header", source);
  const std::string header(bytes.substr(start, size));
  static const std::regex type(R"('descr': *'[<|]([iu][1248])')"),
      shape(R"('shape': *\(([0-9]{1,18}),\))");
  static const std::map<std::string, at::ScalarType> types{{"i1", at::kChar}, {"i2", at::kShort},
      {"i4", at::kInt}, {"i8", at::kLong}, {"u1", at::kByte}, {"u2", at::kUInt16},
      {"u4", at::kUInt32}, {"u8", at::kUInt64}};
  std::smatch kind, count;
  PITH_CHECK(std::regex_search(header, kind, type) && std::regex_search(header, count, shape),
      "{}: {} is not a one-dimensional array of integers", source, header);
  bytes.remove_prefix(start + size);
  const auto dtype = types.at(kind[1]);
  const auto elements = std::stoll(count[1]), width = static_cast<long long>(elementSize(dtype));
  PITH_CHECK(elements <= std::ssize(bytes) / width,
      "{}: {} elements of {} bytes do not fit the {} bytes that follow", source, elements, width,
      bytes.size());
  const Tensor array = at::from_blob(const_cast<char*>(bytes.data()), {elements}, dtype);
  bytes.remove_prefix(array.nbytes());
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
    const Tensor values = read_numpy(bytes, input.path);
    const Tensor ends = read_numpy(bytes, input.path).to(at::kLong);
    PITH_CHECK(bytes.empty(), "{}: {} bytes after its two arrays", input.path, bytes.size());
    int64_t begin = 0;
    for (int64_t d = 0; d < ends.numel(); ++d) {
      const int64_t end = ends.const_data_ptr<int64_t>()[d];
      PITH_CHECK(end >= begin && end <= values.numel(), "{}: document {} ends at {}, not in {}..{}",
          input.path, d, end, begin, values.numel());
      const Tensor document = values.narrow(0, begin, end - begin).to(at::kLong);
      std::vector<int32_t> ids;
      for (const int64_t id : std::span(document.const_data_ptr<int64_t>(), document.numel()))
        ids.push_back(narrow<int32_t>(id));
      writer.add_document(ids);
      begin = end;
    }
    PITH_CHECK(begin == values.numel(), "{}: there are tokens after the last document", input.path);
  }
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
    sub->add_option("--tokenizer", o->tokenizer, "that of the inputs, if they do not state it")
        ->required(name == "import");
    sub->add_option("--shard-size", o->shard_tokens, "tokens a shard")
        ->check(CLI::PositiveNumber)
        ->required(name == "split");
  };
  add_copy("merge", "Join corpora of one tokenizer", copy_corpora);
  add_copy("split", "Cut corpora into shards", copy_corpora);
  add_copy("import", "Read .bin files of the Python PithTrain: two numpy arrays", import_numpy);

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
