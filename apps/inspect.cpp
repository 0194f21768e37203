// pithtrain inspect: explains a corpus, checkpoint, model folder or safetensors file.
#include <nlohmann/json.hpp>
#include "apps/commands.h"
#include "engine/checkpoint.h"
#include "engine/corpus.h"
#include "engine/metrics.h"
#include "text/tokenizer.h"

namespace pith {
namespace {
struct Inspection {
  string target = {};
  bool tensors = false; // every tensor on a line of its own
  bool quick = false; // no sums of data
  const char* verdict() const { // where no damage was found
    return quick ? "not verified (--quick)" : "all files are as they were written";
  }
};

template <class... Values>
void title(const fs::path& path, fmt::format_string<Values...> what, Values&&... values) {
  fmt::print("{}: {}\n", path, fmt::format(what, std::forward<Values>(values)...));
}

// Damage that was found goes to stderr, and makes the exit status 1.
void report(const vector<string>& problems) {
  std::fflush(stdout);
  for (const string& problem: problems) fmt::print(stderr, "damaged: {}\n", problem);
  if (!problems.empty()) throw CLI::RuntimeError(1);
}

// Counts, then tensors by pattern, or one a line.
void print_tensors(const Inspection& options, const vector<SafetensorsFile>& files) {
  map<string, vector<string>> kinds; // dtype and shape: names
  uint64_t count = 0, elements = 0, bytes = 0;
  for (const SafetensorsFile& file: files)
    for (const auto& [name, entry]: file.header().tensors) {
      kinds[fmt::format("{} ({})", dtype_name(entry.dtype), fmt::join(entry.shape, ", "))]
        .push_back(name);
      ++count;
      elements += (entry.end - entry.begin) / c10::elementSize(entry.dtype);
      bytes += entry.end - entry.begin;
    }
  line("tensors", "{}, files: {}, elements: {}, {}", count, files.size(),
    fmt::group_digits(elements), human_bytes(bytes));
  set<pair<string, string>> rows;
  for (const auto& [kind, names]: kinds)
    for (const string& name: options.tensors ? names : summarize_names(names))
      rows.emplace(name, kind);
  for (const auto& [name, kind]: rows) fmt::print("    {:<24}  {}\n", kind, name);
}

void inspect_safetensors(const Inspection& options, const fs::path& path) {
  vector<SafetensorsFile> files;
  files.emplace_back(path);
  title(path, "safetensors file, {}", human_bytes(fs::file_size(path)));
  for (const auto& [key, value]: files[0].header().metadata)
    line("metadata", "{} = {}", key, value);
  print_tensors(options, files);
}

// config.json, if any, and the weights of a model folder.
void inspect_model(const Inspection& options, const fs::path& folder) {
  if (fs::exists(folder / "config.json")) line("model", "{}", read_model_type(folder));
  print_tensors(options, HfFolder(folder).files());
}

void inspect_checkpoint(const Inspection& options, const fs::path& folder) {
  const Manifest manifest = read_manifest(folder);
  uint64_t bytes = 0, optimizer_bytes = 0;
  for (const auto& [name, file]: manifest.files) {
    bytes += file.bytes;
    if (name.starts_with("optimizer/")) optimizer_bytes += file.bytes;
  }
  title(folder, "checkpoint of step {}, {} files, {}", grouped(manifest.step),
    manifest.files.size() + 1, human_bytes(bytes));
  if (!options.quick) report(verify_checkpoint(folder));
  line("checksums", "{}", options.verdict());
  const nlohmann::json state = read_json(folder / "training_state.json");
  for (const auto& [key, value]: state.items()) line("state", "{} = {}", key, value.dump());
  if (optimizer_bytes > 0) {
    const OptimizerReader reader(folder); // is it whole?
    line("optimizer", "{}", human_bytes(optimizer_bytes));
  }
  inspect_model(options, folder);
}

void inspect_corpus(const Inspection& options, const string& prefix) {
  const Corpus corpus(prefix);
  const int64_t documents = corpus.num_documents(), tokens = corpus.num_tokens();
  const vector<string> shards = corpus_shards(prefix);
  uint64_t bytes = 0;
  for (const string& shard: shards)
    bytes += fs::file_size(shard + ".bin") + fs::file_size(shard + ".idx");
  title(prefix, "corpus of {} documents, {} tokens, {}", grouped(documents), grouped(tokens),
    human_bytes(bytes));
  if (shards.size() > 1) line("shards", "{}", shards.size());
  line("ids", "{}, vocabulary {}", corpus.dtype(),
    corpus.vocab_size() > 0 ? grouped(corpus.vocab_size()) : "not stated");
  vector<int64_t> lengths;
  for (int64_t d = 0; d < documents; ++d) lengths.push_back(corpus.length(d));
  ranges::sort(lengths);
  if (documents > 0)
    line("lengths", "{} shortest, {} median, {} mean, {} longest", grouped(lengths.front()),
      grouped(lengths[lengths.size() / 2]), grouped(tokens / documents), grouped(lengths.back()));
  line("fingerprint", "{}", corpus.fingerprint());
  vector<string> problems;
  if (const string folder = prefix + ".tokenizer"; fs::is_directory(folder)) {
    const string hash = hex(Tokenizer::load(folder).hash());
    line("tokenizer", "{} ({})", folder, hash);
    if (hash != corpus.tokenizer_hash())
      problems.push_back(fmt::format(
        "{} is not the tokenizer of this corpus ({})", folder, corpus.tokenizer_hash()));
  }
  if (!options.quick) ranges::move(verify_corpus(prefix), back_inserter(problems));
  report(problems);
  line("checksums", "{}",
    corpus.vocab_size() > 0 ? options.verdict() : "none: " + prefix + ".json is not there");
}

void inspect(const Inspection& options) {
  fs::path path = options.target;
  if (!path.has_filename()) path = path.parent_path(); // written with a slash at its end
  if (path.filename() == "manifest.json") path = fs::absolute(path).parent_path();
  if (fs::is_directory(path)) {
    if (fs::exists(path / "manifest.json") || path.filename().string().starts_with("step-"))
      return inspect_checkpoint(options, path);
    for (const fs::path& root: {path, path / "checkpoints"})
      if (const auto newest = newest_checkpoint(root)) return inspect_checkpoint(options, *newest);
    for (const char* name: {"config.json", "model.safetensors", "model.safetensors.index.json"}) {
      if (!fs::exists(path / name)) continue;
      title(path, "Hugging Face model folder");
      return inspect_model(options, path);
    }
  }
  if (path.extension() == ".safetensors") return inspect_safetensors(options, path);
  for (const fs::path& prefix: {path, fs::path(path).replace_extension()})
    if (!corpus_shards(prefix.string()).empty()) return inspect_corpus(options, prefix.string());
  PITH_FAIL_HINT("known are checkpoints, run folders, model folders, safetensors files and corpora",
    "{} {}", path, fs::exists(path) ? "is none that this program knows" : "does not exist");
}
}

string read_model_type(const fs::path& path) {
  const auto file = fs::is_directory(path) ? path / "config.json" : path;
  const nlohmann::json config = read_json(file);
  const auto type = config.is_object() ? config.value("model_type", nlohmann::json()) : config;
  PITH_CHECK(type.is_string(), "{} has no \"model_type\": it is not a model configuration", file);
  return type.get<string>();
}

string human_bytes(uint64_t bytes) {
  return bytes < 1000 ? fmt::format("{} bytes", bytes) : human(real(bytes)) + "B";
}

void add_inspect_command(CLI::App& app, const string& name, const string& what, bool quick) {
  const auto [sub, o] = add_command<Inspection>(app, name, what, inspect);
  o->quick = quick;
  sub->add_option("path", o->target, "what to explain")->required();
  sub->add_flag("--tensors", o->tensors, "list every tensor, not patterns of names");
  sub->add_flag("--quick", o->quick, "do not read all data to verify checksums");
  sub->footer(
    "Says what PATH is, its sizes, and what is damaged in it (then the exit status is 1); of a "
    "run "
    "folder,\nwhat its newest complete checkpoint is.\n"
    "Example: pithtrain inspect runs/demo/checkpoints/step-00000300");
}
}
