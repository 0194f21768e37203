// pithtrain convert: a model folder as another one. pithtrain compare: two folders, files or runs.
#include <nlohmann/json.hpp>
#include "apps/families.h"
#include "engine/config.h"

namespace pith {
namespace {
using nlohmann::json;

const map<string, ScalarType> kDtypes{
  {"bfloat16", kBFloat16}, {"float16", kHalf}, {"float32", kFloat}};

struct ConvertOptions {
  string from, to, dtype, reinit;
  int64_t layers = 0, vocabulary = 0;
  uint64_t shard_bytes = 5'000'000'000, seed = 1;
  double init_std = 0.02;
};

// What a new folder takes over unchanged, where the old one has it.
constexpr const char* kCopied[] = {"generation_config.json", "tokenizer.json",
  "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
  "merges.txt", "tokenizer.model", "chat_template.jinja"};

template <class Model> void convert(const ConvertOptions& o) {
  typename Model::Config old = Model::Config::parse_file(o.from), config = old;
  if (o.layers > 0) config.cut_layers(o.layers);
  if (o.vocabulary > 0) config.vocab_size = o.vocabulary;
  Model before(old, whole_model(old.num_layers, old.num_experts));
  Model after(config, whole_model(config.num_layers, config.num_experts));
  const HfFolder folder(o.from);
  const vector<string> tied{"lm_head.weight"};
  vector<ImportTarget> all; // nothing of each: the whole folder is checked first
  for (const auto& unit: before.parameter_units())
    for (const Parameter* parameter: unit)
      for (const HfTensor& tensor: parameter->tensors)
        all.push_back({&tensor, 0, at::empty({0}, kFloat)});
  import_weights(folder, all, span(tied).first(old.tie_embeddings ? 1 : 0));
  const SafetensorsFile* stored = folder.file_of(all.front().tensor->name);
  const ScalarType main_dtype = o.dtype.empty()
    ? stored->header().tensors.at(all.front().tensor->name).dtype
    : kDtypes.at(o.dtype);

  const fs::path to = fs::path(o.to) / "", target = to.parent_path();
  PITH_CHECK(!target.empty(), "the folder to make has no name");
  PITH_CHECK(!fs::exists(target) || (fs::is_directory(target) && fs::is_empty(target)),
    "{} exists already", target);
  PITH_CHECK(int64_t(o.shard_bytes) > 0, "--shard-size must be positive");
  PITH_CHECK(o.init_std >= 0 && o.init_std <= 100, "--init-std {} is not in [0, 100]", o.init_std);
  const regex again = name_pattern(o.reinit);
  const fs::path temporary = target.string() + ".converting";
  if (target.has_parent_path()) fs::create_directories(target.parent_path());
  if (!fs::create_directory(temporary))
    PITH_FAIL_HINT(
      "another convert writes it, or one was killed: then remove it", "{} exists", temporary);
  const shared_ptr<void> discard(nullptr, [&](void*) { // what was not renamed
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
  });
  vector<WrittenFile> written;
  vector<NamedTensor> shard;
  uint64_t bytes = 0;
  int64_t tensors = 0, renewed = 0;
  const auto write = [&] {
    const auto files = write_weights(temporary, ssize(written), exchange(shard, {}), o.shard_bytes);
    written.insert(written.end(), files.begin(), files.end());
    bytes = 0;
  };
  for (const auto& unit: after.parameter_units())
    for (const Parameter* parameter: unit)
      for (const HfTensor& tensor: parameter->tensors) {
        const SafetensorsFile* file = folder.file_of(tensor.name);
        const ScalarType dtype =
          !o.dtype.empty() || !file ? main_dtype : file->header().tensors.at(tensor.name).dtype;
        Tensor value = at::empty(tensor.shape, dtype);
        if (Tensor flat = value.view(-1); !o.reinit.empty() && regex_search(tensor.name, again)) {
          initialize_tensor(flat, *parameter, tensor, 0, o.seed, o.init_std, config.num_layers);
          ++renewed;
        } else if (parameter->group == ParameterGroup::embedding) { // rows may come or go
          const Tensor rows = folder.tensor(tensor.name);
          const int64_t kept = min(rows.size(0), value.size(0));
          value.narrow(0, 0, kept).copy_(rows.narrow(0, 0, kept));
          if (kept < value.size(0))
            value.narrow(0, kept, value.size(0) - kept).copy_(rows.mean(0, true, kDouble));
        } else {
          import_tensor(folder, {&tensor, 0, flat});
        }
        PITH_CHECK(o.dtype.empty() || !value.isinf().any().item<bool>(), "{} has numbers beyond {}",
          tensor.name, o.dtype);
        if (!shard.empty() && bytes + value.nbytes() > o.shard_bytes) write();
        bytes += value.nbytes();
        shard.emplace_back(tensor.name, std::move(value));
        ++tensors;
      }
  PITH_CHECK(o.reinit.empty() || renewed > 0, "--reinit {}: no tensor has such a name", o.reinit);
  write();
  write_weight_index(temporary, written);
  json text = json::parse(with_router_state(config.to_json(main_dtype), config.router_state));
  (text.contains("text_config") ? text["text_config"] : text)["vocab_size"] = config.vocab_size;
  write_file(temporary, "config.json", text.dump(2) + "\n");
  write_file(temporary, "generation_config.json", config.generation_json());
  for (const char* name: kCopied)
    if (fs::exists(folder.path() / name))
      write_file(temporary, name, read_file(folder.path() / name));
  sync_folder(temporary);
  fs::remove(target);
  fs::rename(temporary, target);
  fmt::print(
    "{}: {} tensors in {} files, {} of them new\n", target, tensors, written.size(), renewed);
  const json special = json::parse(config.generation_json());
  for (const auto& [key, id]: special.items())
    if (id.is_number_integer() && id >= config.vocab_size)
      fmt::print("note: {} {} is beyond the vocabulary of {}\n", key, id.dump(), config.vocab_size);
}

struct CompareOptions {
  string a, b;
  double tolerance = 0;
  size_t limit = 20;
};

struct Difference {
  string what, name;
  double relative;
};

// Tensors by name, of a model folder or one safetensors file.
map<string, Tensor> tensors_of(const fs::path& path) {
  map<string, Tensor> tensors;
  const auto add = [&](const SafetensorsFile& file) {
    for (const auto& [name, entry]: file.header().tensors) tensors[name] = file.tensor(name);
  };
  if (fs::is_directory(path)) ranges::for_each(HfFolder(path).files(), add);
  else add(SafetensorsFile(path));
  return tensors;
}

// |a - b| / |a| and the largest |a - b|, in double precision, part by part.
Difference difference(const string& name, const Tensor& a, const Tensor& b) {
  double square = 0, whole = 0, largest = 0;
  constexpr int64_t kPart = 1 << 22;
  for (int64_t at = 0; at < a.numel(); at += kPart) {
    const auto part = [&](const Tensor& x) {
      return x.reshape(-1).narrow(0, at, min(kPart, a.numel() - at)).to(kDouble);
    };
    const Tensor x = part(a), y = part(b);
    const Tensor apart = (x - y).abs().masked_fill(x.eq(y) | (x.isnan() & y.isnan()), 0);
    square += apart.square().sum().item<double>();
    whole += x.masked_fill(~x.isfinite(), 0).square().sum().item<double>();
    largest = max(largest, apart.max().item<double>());
    if (!isfinite(square)) largest = square; // NaN hides in max() of some
  }
  const double relative = // NaN sorts first; squares of tiny numbers may be 0
    largest == 0  ? 0
    : square == 0 ? largest
                  : sqrt(square / whole);
  return {fmt::format("{:.3e} {:.3e}", largest, relative), name, relative};
}

// The lines of a run's metrics that tell of a step, by step.
map<int64_t, json> steps_of(const fs::path& run) {
  map<int64_t, json> steps;
  ifstream file(run / "metrics.jsonl");
  for (string text; getline(file, text);)
    if (json line = json::parse(text, nullptr, /*allow_exceptions=*/false); line.is_object())
      if (const json step = line.value("step", json()); step.is_number_integer())
        steps[step] = std::move(line);
  return steps;
}

// Curves of one run over the steps that another has too.
map<string, Tensor> curves_of(const map<int64_t, json>& steps, const map<int64_t, json>& other) {
  map<string, Tensor> curves;
  for (const char* key: {"loss", "balance_loss", "grad_norm", "lr"}) {
    vector<double> values;
    for (const auto& [step, line]: steps) {
      const json value = line.value(key, json());
      if (other.contains(step)) values.push_back(value.is_number() ? value.get<double>() : NAN);
    }
    curves[key] = at::tensor(values, kDouble);
  }
  return curves;
}

void compare(const CompareOptions& o) {
  const auto is_run = [](const string& path) {
    return fs::is_regular_file(fs::path(path) / "metrics.jsonl");
  };
  const bool runs = is_run(o.a) && is_run(o.b);
  map<string, Tensor> a, b;
  if (runs) {
    const auto steps_a = steps_of(o.a), steps_b = steps_of(o.b);
    a = curves_of(steps_a, steps_b);
    b = curves_of(steps_b, steps_a);
    const int64_t common = a.at("loss").numel();
    PITH_CHECK(common > 0, "{} and {} have no step in common", o.a, o.b);
    fmt::print("{} steps in common, of {} and {}\n", common, steps_a.size(), steps_b.size());
  } else {
    a = tensors_of(o.a), b = tensors_of(o.b);
  }
  vector<Difference> differences;
  for (const auto& [name, x]: a) {
    const auto found = b.find(name);
    const bool alike = found != b.end() && x.sizes() == found->second.sizes();
    if (alike) differences.push_back(difference(name, x, found->second));
    else if (found == b.end()) differences.push_back({"only in A", name, INFINITY});
    else
      differences.push_back({fmt::format("({}) and ({})", fmt::join(x.sizes(), ", "),
                               fmt::join(found->second.sizes(), ", ")),
        name, INFINITY});
  }
  for (const auto& [name, y]: b)
    if (!a.contains(name)) differences.push_back({"only in B", name, INFINITY});
  PITH_CHECK(!differences.empty(), "{} and {} hold no tensors", o.a, o.b);
  const auto within = [&](const Difference& d) {
    return d.relative <= o.tolerance && d.relative < INFINITY;
  };
  ranges::stable_sort(differences, [](const Difference& x, const Difference& y) {
    return std::isnan(x.relative) > std::isnan(y.relative) || x.relative > y.relative;
  });
  fmt::print("max|A-B|  |A-B|/|A|\n");
  for (const Difference& d: differences | std::views::take(o.limit))
    fmt::print("{:<20} {}\n", d.what, d.name);
  const auto same = ranges::count(differences, 0, &Difference::relative);
  const auto good = ranges::count_if(differences, within);
  fmt::print("{} {}, {} equal, {} within {}\n", differences.size(), runs ? "curves" : "tensors",
    same, good, o.tolerance);
  if (good < ssize(differences)) throw CLI::RuntimeError(1);
}
}

void add_convert_command(CLI::App& app) {
  const auto [sub, o] = add_command<ConvertOptions>(app, "convert",
    "Write a model folder anew: other dtype or shards, fewer layers, another vocabulary",
    [](const ConvertOptions& options) {
    with_family(options.from, [&]<class Model>() { convert<Model>(options); });
  });
  sub->add_option("from", o->from, "Model folder or checkpoint")->required();
  sub->add_option("to", o->to, "Folder to make")->required();
  sub->add_option("--dtype", o->dtype, "bfloat16, float16 or float32 (default: as stored)")
    ->check(CLI::IsMember(kDtypes));
  sub->add_option("--shard-size", o->shard_bytes, "Largest file (default 5GB)")
    ->transform(CLI::AsSizeValue(true));
  sub->add_option("--layers", o->layers, "Keep the first N layers")->check(CLI::PositiveNumber);
  sub
    ->add_option(
      "--vocabulary", o->vocabulary, "Rows of embedding and head; new ones are the mean of the old")
    ->check(CLI::PositiveNumber);
  sub->add_option("--reinit", o->reinit, "Draw tensors anew whose names match this expression");
  sub->add_option("--seed", o->seed, "of --reinit (default 1)");
  sub->add_option("--init-std", o->init_std, "of --reinit (default 0.02)");
  sub->footer(
    "MXFP4 weights become bfloat16. Memory: one shard.\n"
    "Example: pithtrain convert gpt-oss-20b cut --layers 6 --dtype bfloat16");

  const auto [other, c] = add_command<CompareOptions>(app, "compare",
    "Differences of two model folders or safetensors files by tensor, of two runs by curve",
    compare);
  other->add_option("a", c->a, "Folder or file")->required();
  other->add_option("b", c->b, "Another")->required();
  other->add_option("--tolerance", c->tolerance, "Largest |A-B|/|A| that passes (default 0)");
  other->add_option("--limit", c->limit, "Lines to print, largest first (default 20)");
  other->footer(
    "Exit status 1 where a tensor lies beyond the tolerance or in one of both only.\n"
    "Example: pithtrain compare runs/a runs/b --tolerance 1e-3");
}
}
