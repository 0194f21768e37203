// pithtrain generate: text from a model folder, with a key-value cache, several prompts at once.
#include <nlohmann/json.hpp>

#include "apps/commands.h"
#include "apps/families.h"
#include "core/device.h"
#include "engine/batches.h"
#include "engine/checkpoint.h"
#include "engine/file_io.h"
#include "engine/pipeline.h"
#include "engine/sampling.h"
#include "text/tokenizer.h"

namespace pith {
namespace {

namespace fs = std::filesystem;

struct GenerateOptions {
  std::string folder, dtype = "auto", device = "auto";
  std::vector<std::string> prompts, prompt_files;
  int64_t max_tokens = 200, threads = 0;
  bool no_cache = false, ignore_eos = false, quiet = false;
  SamplingOptions sampling;
};

using Ids = std::vector<int64_t>;

// Ids that end a document: of generation_config.json, config.json and the tokenizer.
std::set<int64_t> end_ids(const fs::path& folder, const Tokenizer& tokenizer) {
  std::set<int64_t> ids;
  if (tokenizer.eos_id()) ids.insert(*tokenizer.eos_id());
  for (const char* name : {"generation_config.json", "config.json"}) {
    if (!fs::exists(folder / name)) continue;
    const nlohmann::json eos = read_json(folder / name).value("eos_token_id", nlohmann::json());
    for (const nlohmann::json& id : eos.is_array() ? eos : nlohmann::json::array({eos}))
      if (id.is_number_integer()) ids.insert(id.get<int64_t>());
  }
  return ids;
}

// The new tokens of every sequence as one micro-batch, each a document that begins at position
// `done`.
MicroBatch pack(std::span<const Ids> sequences, std::span<const size_t> done, at::Device device) {
  std::vector<Row> rows(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto from = static_cast<std::ptrdiff_t>(done[i]);
    rows[i].tokens.assign(sequences[i].begin() + from, sequences[i].end());
    rows[i].labels.assign(rows[i].tokens.size(), -100);
    rows[i].positions.resize(rows[i].tokens.size());
    std::iota(rows[i].positions.begin(), rows[i].positions.end(), from);
    rows[i].document_begins = {0};
  }
  return make_microbatch(rows, true, 0, static_cast<int64_t>(rows.size()), device);
}

template <class Model>
void generate(const GenerateOptions& options) {
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  Mesh mesh;
  mesh.device = select_device(options.device);
  std::string dtype = options.dtype;
  if (dtype == "auto") dtype = mesh.device.is_cpu() ? "fp32" : "bf16";
  PITH_CHECK(dtype == "fp32" || dtype == "bf16", "--dtype is auto, fp32 or bf16, not {}", dtype);
  PITH_CHECK(options.max_tokens >= 1, "--max-tokens must be at least 1");

  const auto config = Model::Config::parse_file(options.folder);
  Model model(config, whole_model(config.num_layers, config.num_experts));
  std::vector<ShardGroup> groups = make_shard_groups(model.parameter_units(),
      dtype == "fp32" ? at::kFloat : at::kBFloat16, mesh, ShardGroup::Use::inference);
  restore_weights(groups, options.folder, config.tie_embeddings);
  const Tokenizer tokenizer = Tokenizer::load(options.folder);
  PITH_CHECK(tokenizer.vocab_size() <= config.vocab_size, "the tokenizer has {} ids, the model {}",
      tokenizer.vocab_size(), config.vocab_size);

  std::vector<std::string> texts = options.prompts;  // and then their continuations
  for (const std::string& file : options.prompt_files) texts.push_back(read_file(file));
  if (texts.empty()) PITH_FAIL_HINT("give --prompt or --prompt-file", "no prompt");
  std::vector<Ids> sequences;
  size_t longest = 0;
  for (const std::string& prompt : texts) {
    const std::vector<int32_t> ids = tokenizer.encode(prompt).ids;
    PITH_CHECK(!ids.empty(), "the prompt \"{}\" holds no token", prompt);
    longest = std::max(longest, ids.size());
    sequences.emplace_back(ids.begin(), ids.end());
  }
  const int64_t positions = static_cast<int64_t>(longest) + options.max_tokens;
  PITH_CHECK(positions <= config.max_positions,
      "prompt and answer would take {} positions, the model has {} (max_position_embeddings)",
      positions, config.max_positions);

  Pipeline<Model> pipeline(model, mesh, positions, {});
  const std::set<int64_t> ends = end_ids(options.folder, tokenizer);
  std::vector<LayerCache> caches(options.no_cache ? 0 : static_cast<size_t>(config.num_layers));
  std::vector<size_t> done(texts.size(), 0);  // tokens of each sequence that the caches hold
  std::set<size_t> running;
  for (size_t i = 0; i < texts.size(); ++i) running.insert(i);
  std::vector<StreamingDecoder> decoders(texts.size(), StreamingDecoder(tokenizer));
  const auto start = std::chrono::steady_clock::now();
  int64_t produced = 0;
  const bool stream = texts.size() == 1;
  if (stream) fmt::print("{}", texts[0]);
  for (int64_t n = 0; n < options.max_tokens && !running.empty(); ++n) {
    const std::vector<MicroBatch> batch{pack(sequences, done, mesh.device)};
    const BatchResult result = pipeline.forward_only(batch, LastTokenLogits(), caches);
    const Tensor logits = result.per_token[0].to(at::kCPU).contiguous();  // (B, V)
    const auto vocab = static_cast<size_t>(logits.size(1));
    for (size_t i = 0; i < texts.size(); ++i) {
      if (!options.no_cache) done[i] = sequences[i].size();
      const std::span<const float> row(logits.const_data_ptr<float>() + i * vocab, vocab);
      // A draw depends on seed, prompt and position alone, not on how long the other prompts run.
      const uint64_t draw = (static_cast<uint64_t>(i) << 32) + static_cast<uint64_t>(n);
      const int64_t id = sample(row, options.sampling, draw);
      sequences[i].push_back(id);
      if (!running.contains(i)) continue;  // it runs along unseen, so that rows stay aligned
      if (!options.ignore_eos && ends.contains(id)) running.erase(i);
      ++produced;
      const std::string text = decoders[i].push(static_cast<int32_t>(id));
      texts[i] += text;
      if (!stream) continue;
      fmt::print("{}", text);
      std::fflush(stdout);
    }
  }
  if (stream) fmt::print("{}\n", decoders[0].finish());
  for (size_t i = 0; !stream && i < texts.size(); ++i)
    fmt::print("=== {}\n{}{}\n", i + 1, texts[i], decoders[i].finish());
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  if (!options.quiet)
    fmt::print(stderr, "{} tokens in {:.2f} s, {:.1f} tokens/s\n", produced, elapsed.count(),
        real(produced) / elapsed.count());
}

}  // namespace

void add_generate_command(CLI::App& app) {
  const auto [sub, o] = add_command<GenerateOptions>(app, "generate",
      "Continue prompts with a model folder or checkpoint", [](const GenerateOptions& options) {
        with_family(options.folder, [&]<class Model>() { return generate<Model>(options); });
      });
  SamplingOptions& sampling = o->sampling;
  sub->add_option("folder", o->folder, "Hugging Face folder or checkpoint")->required();
  sub->add_option("--prompt", o->prompts, "Text to continue; may be given several times")
      ->allow_extra_args(false);
  sub->add_option("--prompt-file", o->prompt_files, "From a file")->allow_extra_args(false);
  sub->add_option("--max-tokens", o->max_tokens, "Longest answer in tokens (default 200)");
  sub->add_option("--temperature", sampling.temperature, "0 = greedy; default 1");
  sub->add_option("--top-k", sampling.top_k, "Keep the k likeliest tokens; 0 = all");
  sub->add_option("--top-p", sampling.top_p, "Keep the likeliest tokens of this mass");
  sub->add_option("--min-p", sampling.min_p, "Drop tokens below this share of the likeliest");
  sub->add_option("--seed", sampling.seed, "Seed of the draws (default 0)");
  sub->add_flag("--ignore-eos", o->ignore_eos, "Do not stop at the end of the document");
  sub->add_flag("--no-cache", o->no_cache, "Compute all again for each token (slow; a check)");
  sub->add_flag("--quiet", o->quiet, "No speed line on stderr");
  sub->add_option("--dtype", o->dtype, "auto (fp32 on CPU, bf16 on GPU), fp32, bf16");
  sub->add_option("--device", o->device, "auto (default), cpu, cuda");
  sub->add_option("--threads", o->threads, "CPU threads; 0 = all");
  sub->footer(
      "Example: pithtrain generate runs/demo/checkpoints/step-00000300 --prompt \"#include <\" "
      "--temperature 0.7");
}

}  // namespace pith
