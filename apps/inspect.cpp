// pithtrain inspect: explains a corpus, checkpoint, run folder, model folder or safetensors file.
#include <nlohmann/json.hpp>

#include "apps/commands.h"
#include "engine/checkpoint.h"
#include "engine/corpus.h"
#include "engine/metrics.h"
#include "text/tokenizer.h"

namespace pith {
namespace {

constexpr const char *kSound = "all files are as they were written",
                     *kUnverified = "not verified (--quick)";

template <class... Values>
void title(const fs::path& path, fmt::format_string<Values...> what, Values&&... values) {
  fmt::print("{}: {}\n", path.string(), fmt::format(what, std::forward<Values>(values)...));
}

struct Inspection {
  std::string target = {};
  bool tensors = false;  // every tensor on a line of its own
  bool quick = false;    // no sums of data
  std::vector<std::string> problems = {};

  // False where it threw, which is a problem.
  template <class Part> bool attempt(Part part) {
    const std::string problem = problem_of(part);
    if (!problem.empty()) problems.push_back(problem);
    return problem.empty();
  }
  void add(const std::vector<std::string>& more) {
    problems.insert(problems.end(), more.begin(), more.end());
  }

  // Counts, then tensors by pattern, or one a line.
  void print_tensors(const std::vector<SafetensorsFile>& files) const {
    std::map<std::string, std::vector<std::string>> kinds;  // dtype and shape: names
    uint64_t count = 0, elements = 0, bytes = 0;
    for (const SafetensorsFile& file : files)
      for (const auto& [name, entry] : file.header().tensors) {
        kinds[fmt::format("{} ({})", dtype_name(entry.dtype), fmt::join(entry.shape, ", "))]
            .push_back(name);
        ++count;
        elements += (entry.end - entry.begin) / c10::elementSize(entry.dtype);
        bytes += entry.end - entry.begin;
      }
    line("tensors", "{}, files: {}, elements: {}, {}", count, files.size(),
        fmt::group_digits(elements), human_bytes(bytes));
    std::set<std::pair<std::string, std::string>> rows;
    for (const auto& [kind, names] : kinds)
      for (const std::string& name : tensors ? names : summarize_names(names))
        rows.emplace(name, kind);
    for (const auto& [name, kind] : rows) fmt::print("    {:<24}  {}\n", kind, name);
  }

  void safetensors(const fs::path& path) {
    std::vector<SafetensorsFile> files;
    if (!attempt([&] { files.emplace_back(path); }))
      return title(path, "safetensors file, not readable");
    title(path, "safetensors file, {}", human_bytes(fs::file_size(path)));
    for (const auto& [key, value] : files[0].header().metadata)
      line("metadata", "{} = {}", key, value);
    print_tensors(files);
  }

  // config.json and the weights of a model folder.
  void model(const fs::path& folder) {
    attempt([&] { line("model", "{}", read_model_type(folder)); });
    attempt([&] { print_tensors(HfFolder(folder).files()); });
  }

  void checkpoint(const fs::path& folder) {
    Manifest manifest;
    if (!attempt([&] { manifest = read_manifest(folder); }))
      return title(folder, "checkpoint, not complete");
    uint64_t bytes = 0, optimizer_bytes = 0;
    for (const auto& [name, file] : manifest.files) {
      bytes += file.bytes;
      if (name.starts_with("optimizer/")) optimizer_bytes += file.bytes;
    }
    title(folder, "checkpoint of step {}, {} files, {}", grouped(manifest.step),
        manifest.files.size() + 1, human_bytes(bytes));
    (void)problem_of([&] {  // told below, by the sums
      const nlohmann::json state = read_json(folder / "training_state.json");
      for (const auto& [key, value] : state.items()) line("state", "{} = {}", key, value.dump());
    });
    if (optimizer_bytes > 0) line("optimizer", "{}", human_bytes(optimizer_bytes));
    model(folder);
    if (quick) return line("checksums", "{}", kUnverified);
    add(verify_checkpoint(folder));
    if (optimizer_bytes > 0) attempt([&] { OptimizerReader reader(folder); });
    if (problems.empty()) line("checksums", "{}", kSound);
  }

  // The checkpoints step-* of a run; false where there are none.
  bool checkpoints(const fs::path& root) {
    std::vector<std::string> steps = names_in(root);
    std::erase_if(steps, [](const std::string& name) { return !name.starts_with("step-"); });
    if (steps.empty()) return false;
    title(root, "{} checkpoints", steps.size());
    for (const std::string& step : steps) {
      const size_t before = problems.size();
      if (!quick) add(verify_checkpoint(root / step));
      const char* state = problems.size() == before ? "sound" : "damaged";
      line(step, "{}", quick ? kUnverified : state);
    }
    const auto newest = newest_checkpoint(root);
    line("newest", "{}", newest ? newest->string() : "none is complete");
    return true;
  }

  void corpus(const std::string& prefix) {
    std::optional<Corpus> opened;
    if (!attempt([&] { opened.emplace(prefix); })) return title(prefix, "corpus, not readable");
    const Corpus& corpus = *opened;
    const int64_t documents = corpus.num_documents(), tokens = corpus.num_tokens();
    const std::vector<std::string> shards = corpus_shards(prefix);
    uint64_t bytes = 0;
    for (const std::string& shard : shards)
      bytes += fs::file_size(shard + ".bin") + fs::file_size(shard + ".idx");
    title(prefix, "corpus of {} documents, {} tokens, {}", grouped(documents), grouped(tokens),
        human_bytes(bytes));
    if (shards.size() > 1) line("shards", "{}", shards.size());
    line("ids", "{}, vocabulary {}", corpus.dtype(),
        corpus.vocab_size() > 0 ? grouped(corpus.vocab_size()) : "not stated");
    std::vector<int64_t> lengths;
    for (int64_t d = 0; d < documents; ++d) lengths.push_back(corpus.length(d));
    std::ranges::sort(lengths);
    if (documents > 0)
      line("lengths", "{} shortest, {} median, {} mean, {} longest", grouped(lengths.front()),
          grouped(lengths[lengths.size() / 2]), grouped(tokens / documents),
          grouped(lengths.back()));
    if (const std::string folder = prefix + ".tokenizer"; fs::is_directory(folder)) {
      const std::string hash = hex(Tokenizer::load(folder).hash());
      line("tokenizer", "{} ({})", folder, hash);
      if (hash != corpus.tokenizer_hash())
        problems.push_back(fmt::format(
            "{} is not the tokenizer of this corpus ({})", folder, corpus.tokenizer_hash()));
    }
    line("fingerprint", "{}", corpus.fingerprint());
    if (!quick) add(verify_corpus(prefix));
    const bool summed = corpus.vocab_size() > 0;
    if (problems.empty())
      line("checksums", "{}",
          quick        ? kUnverified
              : summed ? kSound
                       : "none: " + prefix + ".json is not there");
  }

  void look_at(fs::path path) {
    if (!path.has_filename()) path = path.parent_path();  // written with a slash at its end
    if (path.filename() == "manifest.json") path = fs::absolute(path).parent_path();
    if (fs::is_directory(path)) {
      if (fs::exists(path / "manifest.json") || path.filename().string().starts_with("step-"))
        return checkpoint(path);
      if (checkpoints(path) || checkpoints(path / "checkpoints")) return;
      for (const char* name :
          {"config.json", "model.safetensors", "model.safetensors.index.json"}) {
        if (!fs::exists(path / name)) continue;
        title(path, "Hugging Face model folder");
        return model(path);
      }
    }
    if (path.extension() == ".safetensors") return safetensors(path);
    for (const fs::path& prefix : {path, fs::path(path).replace_extension()})
      if (!corpus_shards(prefix.string()).empty()) return corpus(prefix.string());
    PITH_FAIL_HINT(
        "known are checkpoints, run folders, model folders, safetensors files and corpora", "{} {}",
        path.string(), fs::exists(path) ? "is none that this program knows" : "does not exist");
  }
};

}  // namespace

std::string human_bytes(uint64_t bytes) {
  return bytes < 1000 ? fmt::format("{} bytes", bytes) : human(real(bytes)) + "B";
}

void add_inspect_command(
    CLI::App& app, const std::string& name, const std::string& what, bool quick) {
  const auto [sub, o] = add_command<Inspection>(app, name, what, [](Inspection& inspection) {
    inspection.look_at(inspection.target);
    std::fflush(stdout);
    for (const std::string& problem : inspection.problems)
      fmt::print(stderr, "damaged: {}\n", problem);
    if (!inspection.problems.empty()) throw CLI::RuntimeError(1);
  });
  o->quick = quick;
  sub->add_option("path", o->target, "what to explain")->required();
  sub->add_flag("--tensors", o->tensors, "list every tensor, not patterns of names");
  sub->add_flag("--quick", o->quick, "do not read all data to verify checksums");
  sub->footer(
      "Says what PATH is, its sizes, and what is damaged in it (then the exit status is 1).\n"
      "Example: pithtrain inspect runs/demo/checkpoints/step-00000300");
}

}  // namespace pith
