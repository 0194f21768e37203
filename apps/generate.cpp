// pithtrain generate: text from a model folder, with a key-value cache, several prompts at once.
#include <nlohmann/json.hpp>
#include "apps/families.h"
#include "engine/batches.h"
#include "engine/pipeline.h"
#include "engine/sampling.h"
#include "text/tokenizer.h"

namespace pith {
namespace {
struct GenerateOptions : ModelOptions {
  vector<string> prompts;
  int64_t max_tokens = 200;
  bool no_cache = false;
  SamplingOptions sampling;
};

// Ids that end a document: of the tokenizer and of generation_config.json.
set<int64_t> end_ids(const fs::path& folder, const Tokenizer& tokenizer) {
  set<int64_t> ids;
  if (tokenizer.eos_id()) ids.insert(*tokenizer.eos_id());
  const fs::path file = folder / "generation_config.json";
  const nlohmann::json all = fs::exists(file) ? read_json(file) : nlohmann::json::object();
  const nlohmann::json eos = all.value("eos_token_id", nlohmann::json::array());
  for (const nlohmann::json& id: eos.is_array() ? eos : nlohmann::json::array({eos}))
    if (id.is_number_integer()) ids.insert(id.get<int64_t>());
  return ids;
}

struct Sequence {
  string text; // prompt and continuation
  vector<int64_t> ids;
  StreamingDecoder decoder;
  size_t cached = 0; // tokens that the caches hold
  bool ended = false; // it runs along unseen, so that rows stay aligned
};

// What is not cached of every sequence as one micro-batch, each a document.
MicroBatch pack(const vector<Sequence>& sequences, Device device) {
  vector<Row> rows;
  for (const Sequence& sequence: sequences) {
    Row& row = rows.emplace_back();
    const auto from = std::ptrdiff_t(sequence.cached);
    row.tokens.assign(sequence.ids.begin() + from, sequence.ids.end());
    row.labels.assign(row.tokens.size(), -100);
    row.positions.resize(row.tokens.size());
    std::iota(row.positions.begin(), row.positions.end(), from);
    row.document_begins = {0};
  }
  return make_microbatch(rows, true, 0, ssize(rows), device);
}

template <class Model> void generate(const GenerateOptions& options) {
  LoadedModel<Model> loaded(options, ShardGroup::Use::inference);
  auto& [device, config, model, mesh, groups] = loaded;
  const Tokenizer tokenizer = Tokenizer::load(options.folder);
  PITH_CHECK(tokenizer.vocab_size() <= config.vocab_size, "the tokenizer has {} ids, the model {}",
    tokenizer.vocab_size(), config.vocab_size);

  vector<Sequence> sequences;
  int64_t positions = 0;
  for (const string& prompt: options.prompts) {
    const vector<int32_t> ids = tokenizer.encode(prompt).ids;
    PITH_CHECK(!ids.empty(), "the prompt \"{}\" holds no token", prompt);
    positions = max(positions, ssize(ids) + options.max_tokens);
    sequences.push_back({prompt, {ids.begin(), ids.end()}, StreamingDecoder(tokenizer)});
  }
  PITH_CHECK(positions <= config.max_positions,
    "prompt and answer would take {} positions, the model has {} (max_position_embeddings)",
    positions, config.max_positions);

  Pipeline<Model> pipeline(model, mesh, positions, {});
  const set<int64_t> ends = end_ids(options.folder, tokenizer);
  vector<LayerCache> caches(options.no_cache ? 0 : index(config.num_layers));
  const auto start = Clock::now();
  int64_t produced = 0;
  const bool stream = sequences.size() == 1;
  if (stream) fmt::print("{}", options.prompts[0]);
  for (int64_t n = 0; n < options.max_tokens && !ranges::all_of(sequences, &Sequence::ended); ++n) {
    const vector<MicroBatch> batch{pack(sequences, device)};
    const BatchResult result = pipeline.forward_only(batch, LastTokenLogits(), caches);
    const Tensor logits = result.per_token[0].to(kCPU).contiguous(); // (B, V)
    const auto vocab = index(logits.size(1));
    for (size_t i = 0; i < sequences.size(); ++i) {
      Sequence& sequence = sequences[i];
      if (!options.no_cache) sequence.cached = sequence.ids.size();
      const span<const float> row(logits.const_data_ptr<float>() + i * vocab, vocab);
      // A draw depends on seed, prompt and position alone, not on how long the other prompts run.
      const uint64_t draw = (uint64_t(i) << 32) + uint64_t(n);
      const int64_t id = sequence.ids.emplace_back(sample(row, options.sampling, draw));
      if (sequence.ended) continue;
      sequence.ended = ends.contains(id);
      ++produced;
      const string text = sequence.decoder.push(int32_t(id));
      sequence.text += text;
      if (!stream) continue;
      fmt::print("{}", text);
      std::fflush(stdout);
    }
  }
  if (stream) fmt::print("{}\n", sequences[0].decoder.finish());
  for (size_t i = 0; !stream && i < sequences.size(); ++i)
    fmt::print("=== {}\n{}{}\n", i + 1, sequences[i].text, sequences[i].decoder.finish());
  const double seconds = seconds_since(start);
  fmt::print(stderr, "{} tokens in {:.2f} s, {:.1f} tokens/s\n", produced, seconds,
    real(produced) / seconds);
}
}

void add_generate_command(CLI::App& app) {
  const auto [sub, o] = add_command<GenerateOptions>(app, "generate",
    "Continue prompts with a model folder or checkpoint", [](const GenerateOptions& options) {
    with_family(options.folder, [&]<class Model>() { return generate<Model>(options); });
  });
  SamplingOptions& sampling = o->sampling;
  o->add_to(*sub);
  sub->add_option("--prompt", o->prompts, "Text to continue; may be given several times")
    ->allow_extra_args(false)
    ->required();
  sub->add_option("--max-tokens", o->max_tokens, "Longest answer in tokens (default 200)")
    ->check(CLI::PositiveNumber);
  sub->add_option("--temperature", sampling.temperature, "0 = greedy; default 1");
  sub->add_option("--top-k", sampling.top_k, "Keep the k likeliest tokens; 0 = all");
  sub->add_option("--top-p", sampling.top_p, "Keep the likeliest tokens of this mass");
  sub->add_option("--min-p", sampling.min_p, "Drop tokens below this share of the likeliest");
  sub->add_option("--seed", sampling.seed, "Seed of the draws (default 0)");
  sub->add_flag("--no-cache", o->no_cache, "Compute all again for each token (slow; a check)");
  sub->footer(
    "Example: pithtrain generate runs/demo/checkpoints/step-00000300 --prompt \"#include <\" "
    "--temperature 0.7");
}
}
