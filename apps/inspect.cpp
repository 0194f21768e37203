// pithtrain inspect: explains any corpus, checkpoint, run folder, Hugging Face folder or
// safetensors file.
#include "apps/inspect.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/commands.h"
#include "engine/checkpoint.h"
#include "text/tokenizer.h"

namespace pith {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;
using Problems = std::vector<std::string>;

struct InspectOptions {
  std::string path;
  bool tensors = false;  // every tensor on a line of its own
  bool quick = false;    // no sums of data
};

void line(const std::string& label, const std::string& text) {
  fmt::print("  {:<12} {}\n", label, text);
}

void append(Problems& problems, const Problems& more) {
  problems.insert(problems.end(), more.begin(), more.end());
}

template <class Look>
void attempt(Problems& problems, Look look) {
  try {
    look();
  } catch (const Error& error) {
    problems.push_back(error.message());
  }
}

uint64_t bytes_of(const std::vector<const SafetensorsFile*>& files) {
  uint64_t bytes = 0;
  for (const SafetensorsFile* file : files)
    for (const auto& [name, entry] : file->header().tensors) bytes += entry.end - entry.begin;
  return bytes;
}

// Counts, then tensors by pattern; one a line where a line stands for one anyway, or when all are
// wanted.
void print_tensors(const std::vector<const SafetensorsFile*>& files, bool all) {
  std::map<std::pair<std::string, std::vector<int64_t>>, std::vector<std::string>> kinds;
  std::map<std::string, int64_t> elements;  // by dtype
  size_t count = 0;
  for (const SafetensorsFile* file : files) {
    for (const auto& [name, entry] : file->header().tensors) {
      kinds[{dtype_name(entry.dtype), entry.shape}].push_back(name);
      elements[dtype_name(entry.dtype)] +=
          static_cast<int64_t>((entry.end - entry.begin) / c10::elementSize(entry.dtype));
      ++count;
    }
  }
  std::string sum;
  for (const auto& [dtype, number] : elements)
    sum += fmt::format("{}{} elements of {}", sum.empty() ? "" : ", ", grouped(number), dtype);
  line("tensors",
      fmt::format("{} in {} file{}: {}; {}", grouped(static_cast<int64_t>(count)), files.size(),
          files.size() == 1 ? "" : "s", sum, human_bytes(bytes_of(files))));
  std::vector<std::pair<std::string, std::string>> rows;
  for (const auto& [kind, names] : kinds) {
    const std::string type = fmt::format("{} ({})", kind.first, fmt::join(kind.second, ", "));
    for (const std::string& name : all ? names : summarize_names(names))
      rows.emplace_back(name, type);
  }
  std::sort(rows.begin(), rows.end());
  size_t width = 0;
  for (const auto& [name, type] : rows) width = std::max(width, name.size());
  for (const auto& [name, type] : rows)
    fmt::print("    {:<{}}  {}\n", name, std::min<size_t>(width, 72), type);
}

Problems inspect_safetensors(const fs::path& path, const InspectOptions& options) {
  try {
    const SafetensorsFile file(path);
    fmt::print("{}: safetensors file, {}\n", path.string(), human_bytes(fs::file_size(path)));
    for (const auto& [key, value] : file.header().metadata) line("metadata", key + " = " + value);
    print_tensors({&file}, options.tensors);
    return {};
  } catch (const Error& error) {
    fmt::print("{}: safetensors file, not readable\n", path.string());
    return {error.message()};
  }
}

// config.json and the weights of a model folder.
Problems inspect_model(const fs::path& folder, const InspectOptions& options) {
  Problems problems;
  attempt(problems, [&] {
    const json config = read_json(folder / "config.json");
    const json missing = "not stated";
    const json type = config.is_object() ? config.value("model_type", missing) : json();
    PITH_CHECK(type.is_string(), "{} is not an object with a model_type",
        (folder / "config.json").string());
    line("model", fmt::format("{} ({})", type.get<std::string>(),
                      config.value("/architectures/0"_json_pointer, missing).dump()));
  });
  attempt(problems, [&] {
    const HfFolder weights(folder);
    std::vector<const SafetensorsFile*> files;
    for (const SafetensorsFile& file : weights.files()) files.push_back(&file);
    print_tensors(files, options.tensors);
    const fs::path index = folder / "model.safetensors.index.json";
    if (!fs::exists(index)) return;
    const json stated = read_json(index).value("/metadata/total_size"_json_pointer, json());
    if (stated != bytes_of(files))
      line("note", fmt::format("the index states {} bytes of weights, the files hold {}",
                       stated.dump(), bytes_of(files)));
  });
  return problems;
}

Problems inspect_checkpoint(const fs::path& folder, const InspectOptions& options) {
  Problems problems;
  Manifest manifest;
  try {
    manifest = read_manifest(folder);
  } catch (const Error& error) {
    fmt::print("{}: checkpoint, not complete\n", folder.string());
    return {error.message()};
  }
  uint64_t bytes = 0, optimizer_bytes = 0;
  for (const auto& [name, file] : manifest.files) {
    bytes += file.bytes;
    if (name.starts_with("optimizer/")) optimizer_bytes += file.bytes;
  }
  fmt::print("{}: checkpoint of step {}, {} files, {}\n", folder.string(), grouped(manifest.step),
      manifest.files.size() + 1, human_bytes(bytes));
  try {
    const json state = read_json(folder / "training_state.json");
    for (const auto& [key, value] : state.items())
      line("state", fmt::format("{} = {}", key, value.dump()));
  } catch (const Error&) {  // told below, by the sums
  }
  if (optimizer_bytes > 0) line("optimizer", human_bytes(optimizer_bytes));
  append(problems, inspect_model(folder, options));
  if (options.quick) {
    line("checksums", "not verified (--quick)");
    return problems;
  }
  append(problems, verify_checkpoint(folder));
  attempt(problems, [&] {
    if (optimizer_bytes > 0) OptimizerReader reader(folder);
  });
  if (problems.empty()) line("checksums", "all files are as they were written");
  return problems;
}

// A folder with step-* checkpoints in it: a run's checkpoints.
Problems inspect_checkpoints(
    const fs::path& root, const std::vector<fs::path>& steps, const InspectOptions& options) {
  fmt::print("{}: {} checkpoint{}\n", root.string(), steps.size(), steps.size() == 1 ? "" : "s");
  Problems problems;
  for (const fs::path& step : steps) {
    const Problems found = options.quick ? Problems{} : verify_checkpoint(step);
    line(step.filename().string(), !found.empty()  ? "damaged"
                                   : options.quick ? "not verified"
                                                   : "sound");
    append(problems, found);
  }
  const auto newest = newest_checkpoint(root);
  line("newest", newest ? newest->string() : "none is complete");
  return problems;
}

std::vector<fs::path> step_folders(const fs::path& folder) {
  std::vector<fs::path> steps;
  if (fs::is_directory(folder))
    for (const auto& entry : fs::directory_iterator(folder))
      if (entry.path().filename().string().starts_with("step-")) steps.push_back(entry.path());
  std::sort(steps.begin(), steps.end());
  return steps;
}

constexpr const char* kKnown =
    "known are checkpoints, run folders, model folders, safetensors files and corpora";

Problems inspect(fs::path path, const InspectOptions& options) {
  if (!path.has_filename()) path = path.parent_path();  // written with a slash at its end
  if (path.filename() == "manifest.json") path = fs::absolute(path).parent_path();
  if (fs::is_directory(path)) {
    if (fs::exists(path / "manifest.json") || path.filename().string().starts_with("step-"))
      return inspect_checkpoint(path, options);
    for (const fs::path& root : {path, path / "checkpoints"})
      if (const auto steps = step_folders(root); !steps.empty())
        return inspect_checkpoints(root, steps, options);
    for (const char* name : {"config.json", "model.safetensors", "model.safetensors.index.json"}) {
      if (!fs::exists(path / name)) continue;
      fmt::print("{}: Hugging Face model folder\n", path.string());
      return inspect_model(path, options);
    }
    PITH_FAIL_HINT(
        kKnown, "{} is a folder with nothing in it that this program knows", path.string());
  }
  if (path.extension() == ".safetensors") return inspect_safetensors(path, options);
  for (const fs::path& prefix : {path, fs::path(path).replace_extension()})
    if (fs::exists(prefix.string() + ".idx") || fs::exists(prefix.string() + ".bin"))
      return describe_corpus(prefix.string(), options.quick);
  PITH_FAIL_HINT(
      kKnown, "{} {}", path.string(), fs::exists(path) ? "is of no known kind" : "does not exist");
}

}  // namespace

std::vector<int32_t> document_ids(const Corpus& corpus, int64_t document) {
  std::vector<int64_t> wide(static_cast<size_t>(corpus.length(document)));
  corpus.read(document, 0, wide);
  return {wide.begin(), wide.end()};
}

std::string human_bytes(uint64_t bytes) {
  const char* units[] = {"bytes", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1000 && unit + 1 < std::size(units); ++unit) value /= 1000;
  return fmt::format("{:.{}f} {}", value, unit == 0 ? 0 : 2, units[unit]);
}

std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > (number < 0 ? 1 : 0); at -= 3)
    text.insert(static_cast<size_t>(at), ",");
  return text;
}

Problems describe_corpus(const std::string& prefix, bool quick) {
  std::optional<Corpus> opened;
  try {
    opened.emplace(prefix);
  } catch (const Error& error) {
    fmt::print("{}: corpus, not readable\n", prefix);
    return {error.message()};
  }
  const Corpus& corpus = *opened;
  const int64_t documents = corpus.num_documents(), tokens = corpus.num_tokens();
  fmt::print("{}: corpus of {} documents, {} tokens, {}\n", prefix, grouped(documents),
      grouped(tokens),
      human_bytes(fs::file_size(prefix + ".bin") + fs::file_size(prefix + ".idx")));
  line("ids", fmt::format("{}, vocabulary {}", corpus.dtype(),
                  corpus.vocab_size() > 0 ? grouped(corpus.vocab_size()) : "not stated"));
  if (documents > 0) {
    std::vector<int64_t> lengths(static_cast<size_t>(documents));
    for (int64_t d = 0; d < documents; ++d) lengths[static_cast<size_t>(d)] = corpus.length(d);
    std::sort(lengths.begin(), lengths.end());
    line("lengths", fmt::format("{} shortest, {} median, {} mean, {} longest",
                        grouped(lengths.front()), grouped(lengths[lengths.size() / 2]),
                        grouped(tokens / documents), grouped(lengths.back())));
  }
  Problems problems;
  const std::string folder = prefix + ".tokenizer";
  if (fs::is_directory(folder)) {
    const std::string hash = hex(Tokenizer::load(folder).hash());
    line("tokenizer", fmt::format("{} ({})", folder, hash));
    if (hash != corpus.tokenizer_hash())
      problems.push_back(fmt::format(
          "{} is not the tokenizer of this corpus ({})", folder, corpus.tokenizer_hash()));
  }
  line("fingerprint", corpus.fingerprint());
  if (!quick) append(problems, verify_corpus(prefix));
  if (problems.empty())
    line("checksums", quick                          ? "not verified (--quick)"
                      : fs::exists(prefix + ".json") ? "all files are as they were written"
                                                     : "none: " + prefix + ".json is not there");
  return problems;
}

void report_damage(const Problems& problems) {
  if (problems.empty()) return;
  std::fflush(stdout);
  for (const std::string& problem : problems) fmt::print(stderr, "damaged: {}\n", problem);
  throw CLI::RuntimeError(1);
}

void add_inspect_command(CLI::App& app) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand(
      "inspect", "Explain a corpus, checkpoint, run folder, model folder or safetensors file");
  command->add_option("path", options->path, "what to explain")->required();
  command->add_flag("--tensors", options->tensors, "list every tensor, not patterns of names");
  command->add_flag("--quick", options->quick, "do not read all data to verify checksums");
  command->footer(
      "Says what PATH is, its sizes and tensors, and what is damaged in it (then the exit status "
      "is 1).\n"
      "Example: pithtrain inspect runs/demo/checkpoints/step-00000300");
  command->callback([options] { report_damage(inspect(options->path, *options)); });
}

}  // namespace pith
