// pithtrain estimate: which layouts fit so many GPUs, and how long a step of each may take.
#include "apps/plan.h"
#include "engine/metrics.h"
#include "engine/optimizer.h"

namespace pith {
// Measured on H200 (docs/performance.md): FLOP or bytes a second, shares of transfers that nothing
// hides, factors of layouts. kNetwork (400 Gbit/s), beyond eight GPUs, is not measured.
constexpr double kProducts = 570e12, kAdditions = 2.4e12, kOptimizer = 4.2e12;
constexpr double kLink = 280e9, kNetwork = 45e9;
constexpr double kExposedExperts = 0.25, kExposedShards = 0.5;
constexpr double kRecompute = 1.27, kContext = 1.05, kExperts = 1.05;
constexpr double kGiB = 1 << 30;

bool recomputes(const RunConfig& config, int64_t stage) {
  const string& text = config.parallel.recompute;
  const vector<string> words = CLI::detail::split(text, ',');
  const auto known = [](const string& word) { return word == "none" || word == "layer"; };
  PITH_CHECK(
    ranges::all_of(words, known) && (words.size() == 1 || ssize(words) == config.parallel.pp),
    "parallel.recompute must be \"none\" or \"layer\", or {} of these with commas, it is \"{}\"",
    config.parallel.pp, text);
  return words[words.size() == 1 ? 0 : index(stage)] == "layer";
}

int64_t micro_batches_of(const RunConfig& config, int64_t dp) {
  const int64_t rows = config.training.micro_batch * dp;
  PITH_CHECK(config.training.global_batch % rows == 0,
    "training.global_batch {} is not a multiple of micro_batch {} x data parallelism {}",
    config.training.global_batch, config.training.micro_batch, dp);
  const int64_t count = config.training.global_batch / rows;
  (void)make_schedule(config.parallel.pp, 0, min(count, 4 * config.parallel.pp), true); // too few?
  return count;
}

namespace {
// Elements of parameters, experts of all ranks, and bytes of the optimizer's states.
struct Sizes {
  double dense = 0, expert = 0, states = 0, largest_unit = 0;
};
// Bytes of one process of a stage at its worst moment.
struct StageMemory {
  double weights, gradients, states, activations, buffers;
  double layers, a_layer; // that keep activations; with recomputation one more is whole
  double total() const { return weights + gradients + states + activations + buffers; }
};
struct StepPlan {
  vector<StageMemory> stages;
  double seconds;
  double worst() const { return ranges::max(stages | std::views::transform(&StageMemory::total)); }
};

// Of each unit of the whole model; `rules`: the optimizer's, for a person.
template <class Model> vector<Sizes> unit_sizes(const typename Model::Config& config,
  const RunConfig::Training& training, vector<string>& rules) {
  Model model(config, whole_model(config.num_layers, config.num_experts));
  const Units units = model.parameter_units();
  rules = set_update_rules(units, units, training);
  const OptimizerStates kept = optimizer_states(training);
  vector<Sizes> sizes(units.size());
  for (size_t unit = 0; unit < units.size(); ++unit)
    for (const Parameter* p: units[unit]) {
      Sizes& size = sizes[unit];
      (p->group == ParameterGroup::expert ? size.expert : size.dense) += real(p->numel());
      for (const HfTensor& tensor: p->tensors)
        size.states += real(tensor.numel()) *
          ((kept.ema ? 8 : 4) + (kept.bf16_moments ? 2 : 4) * (tensor.rule.muon ? 1 : 2));
    }
  return sizes;
}

vector<Sizes> stage_sizes(const vector<Sizes>& units, const ModelConfig& config,
  const MeshShape& shape, int64_t world, const vector<int64_t>& chunks) {
  vector<Sizes> sizes(index(shape.pp));
  for (int64_t stage = 0; stage < shape.pp; ++stage) {
    const MeshPlace place = mesh_place(shape, world, stage * (world / shape.pp));
    const ModelPart part = model_part(chunks, shape, place, config);
    Sizes& size = sizes[index(stage)];
    const auto add = [&](const Sizes& unit) {
      size.dense += unit.dense, size.expert += unit.expert, size.states += unit.states;
      size.largest_unit = max(size.largest_unit, unit.dense + unit.expert / real(shape.ep));
    };
    if (part.embedding) add(units.front());
    for (const int64_t layer: part.layers) add(units[index(layer + 1)]);
    if (part.head) add(units.back());
  }
  return sizes;
}

// Layers whose activations a rank keeps at its schedule's worst moment. A backward gives back,
// layer by layer, what a forward against it takes: one more than the larger of before and after.
double peak_layers(const vector<Action>& actions, const array<double, 2>& layers_of_chunk) {
  double kept = 0, peak = 0;
  for (const Action& action: actions) {
    double taken = 0, given = 0;
    for (const Pass& pass: action) {
      if (pass.kind == Pass::forward) taken += layers_of_chunk[index(pass.chunk)];
      if (pass.kind == Pass::backward || pass.kind == Pass::backward_input)
        given += layers_of_chunk[index(pass.chunk)];
    }
    peak = max(peak, kept + (given > 0 && taken > 0 ? max(taken - given, 0.0) + 1 : taken));
    kept += taken - given;
  }
  return peak;
}

// Of config's layout, on shape.pp x dp x cp processes.
StepPlan plan_step(const RunConfig& config, const ModelConfig& model, const ModelSize& size,
  int64_t dp, const vector<int64_t>& chunks, const vector<Sizes>& stages) {
  const MeshShape shape = mesh_shape(config.parallel);
  const int64_t pp = shape.pp, plane = dp * shape.cp;
  const int64_t micro_batches = micro_batches_of(config, dp);
  const double layers = real(model.num_layers), vocabulary = real(model.vocab_size);
  const double head = 6.0 * vocabulary * real(model.hidden_size); // FLOP of a token
  const double layer_cost = (size.flops_per_token - head) / layers / 3;
  vector<StageCosts> costs;
  for (const int64_t n: chunks)
    costs.push_back({real(n) * layer_cost, real(n) * layer_cost, real(n) * layer_cost, 0});
  const int64_t simulated = min(micro_batches, 64 * pp);
  const Simulation schedule =
    simulate(pp, simulated, pp > 1 || shape.ep > 1, costs, {head, pp > 1 ? shape.head_share : 0});

  const double block = real(shape.hsdp ? shape.hsdp_size : plane), ep = real(shape.ep);
  const double width = real(c10::elementSize(compute_dtype(config)));
  const double tokens = real(config.training.micro_batch * config.data.sequence_length / shape.cp);
  const double layer = tokens * real(size.activations_per_token) / layers * width;
  const bool keep = config.parallel.weights == "keep" || block == 1;
  const double all_logits = tokens * vocabulary * width; // in equal parts of at most 1.25 GiB
  const double logits = all_logits / max(1.0, std::ceil(all_logits / (1.25 * kGiB)));
  StepPlan plan{};
  double shards = 0, optimizer = 0, additions = 0; // seconds
  for (int64_t stage = 0; stage < pp; ++stage) {
    const Sizes& part = stages[index(stage)];
    const double held = part.dense + part.expert / ep, owned = (part.dense + part.expert) / block;
    const double whole = keep ? held : owned;
    const double kept = peak_layers(schedule.actions[index(stage)],
      {real(chunks[index(stage)]), real(chunks[index(2 * pp - 1 - stage)])});
    const bool inputs = recomputes(config, stage); // kept of all layers but one
    const double a_layer = inputs ? tokens * real(model.hidden_size) * width : layer;
    const bool has_head = stage == 0 || (stage == 1 && shape.head_share > 0);
    const double gathered = keep ? 0 : part.largest_unit * (2 * width + 3 * 4);
    plan.stages.push_back(
      {whole * width, whole * 4, part.states / block, a_layer * kept + (inputs ? layer : 0),
        gathered + max(has_head ? logits : 0, tokens * size.scratch_per_token), kept, a_layer});
    const double travels = keep ? width + 4 : real(micro_batches) * (2 * width + 4);
    shards = max(shards, held * (1 - 1 / block) * travels / (real(plane) > 8 ? kNetwork : kLink));
    optimizer = max(optimizer, 30 * owned / kOptimizer);
    additions = max(additions, real(micro_batches) * 8 * held / kAdditions);
  }
  const double work = tokens * real(micro_batches) / kProducts;
  const bool recompute = config.parallel.recompute.find("layer") != string::npos;
  const double dispatched = 4 * work * kProducts * layers / real(pp) * real(model.hidden_size) *
    width * min(real(model.experts_per_token), ep) * (1 - 1 / ep);
  plan.seconds = schedule.makespan / real(simulated) * work * (recompute ? kRecompute : 1) *
      (shape.cp > 1 ? kContext : 1) * (shape.ep > 1 ? kExperts : 1) +
    tokens * real(micro_batches) * size.slow_seconds_per_token / real(pp) + additions + optimizer +
    kExposedShards * shards + kExposedExperts * dispatched / (shape.ep > 8 ? kNetwork : kLink);
  return plan;
}

template <class Model> void print_plan_of(const RunConfig& config, int64_t world) {
  const RunConfig::Training& training = config.training;
  const MeshShape shape = mesh_shape(config.parallel);
  const auto model = planned_model<typename Model::Config>(config);
  const ModelSize size = model.size(config.data.sequence_length);
  const int64_t dp = data_parallel(shape, world), micro_batches = micro_batches_of(config, dp);
  const auto chunks = chunks_of(config, model, shape);
  fmt::print(
    "\n# parameters  {} total, {} active per token; {} FLOP per token (forward and backward)\n"
    "# step        {} sequences x {} tokens = {} micro-batches of {} on each of {} ranks\n",
    human(real(size.parameters)), human(real(size.active_parameters)), human(size.flops_per_token),
    training.global_batch, config.data.sequence_length, micro_batches, training.micro_batch, dp);
  vector<string> rules;
  const auto units = unit_sizes<Model>(model, training, rules);
  for (const string& rule: rules) fmt::print("# optimizer   {}\n", rule);
  const StepPlan plan =
    plan_step(config, model, size, dp, chunks, stage_sizes(units, model, shape, world, chunks));
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    const StageMemory& m = plan.stages[stage];
    fmt::print(
      "# memory      stage {}: {:.2f} GiB = weights {:.2f} + gradients {:.2f} + masters and "
      "moments {:.2f} + activations {:.2f} ({:.3g} layers of {:.2f}) + buffers {:.2f}; CUDA, "
      "fragmentation: {:.1f} more\n",
      stage, m.total() / kGiB, m.weights / kGiB, m.gradients / kGiB, m.states / kGiB,
      m.activations / kGiB, m.layers, m.a_layer / kGiB, m.buffers / kGiB, 0.018 * m.total() / kGiB);
  }
  const bool overlap = shape.pp > 1 || shape.ep > 1;
  if (world > 1) fmt::print("{}", mesh_table(shape, world));
  const int64_t shown = min<int64_t>(micro_batches, 2 * shape.pp + 4);
  fmt::print("# chunks      {} layers\n# schedule    rank 0: {}{}\n", fmt::join(chunks, ", "),
    to_string(make_schedule(shape.pp, 0, shown, overlap)), micro_batches > shown ? " ..." : "");
}

struct Options {
  string file;
  vector<string> overrides;
  int64_t gpus = 1;
  double memory = 139, reserve = 0.06;
  size_t limit = 10;
};

template <class Model> void estimate(const Options& o, const RunConfig& given) {
  struct Candidate {
    RunConfig::Parallel parallel;
    int64_t micro_batch;
    StepPlan plan;
  };
  PITH_CHECK(o.memory > 0 && o.reserve >= 0 && o.reserve < 1,
    "--memory {} and --reserve {} leave nothing", o.memory, o.reserve);
  const auto model = planned_model<typename Model::Config>(given);
  const ModelSize size = model.size(given.data.sequence_length);
  vector<string> rules;
  const auto units = unit_sizes<Model>(model, given.training, rules);
  vector<Candidate> fitting;
  double least = INFINITY;
  const auto divides = [&](int64_t n, int64_t of) { return n > 0 && of % n == 0; };
  for (int64_t pp = 1; pp <= model.num_layers; ++pp) {
    if (!divides(pp, o.gpus)) continue;
    const int64_t plane = o.gpus / pp;
    RunConfig config = given;
    config.parallel = {};
    config.parallel.pp = pp;
    vector<int64_t> chunks;
    for (int64_t ep = 1; ep <= min(plane, model.num_experts); ++ep) {
      if (!divides(ep, plane) || !divides(ep, model.num_experts)) continue;
      config.parallel.ep = ep;
      const MeshShape shape = mesh_shape(config.parallel);
      if (chunks.empty() || pp == 1) chunks = chunks_of(config, model, shape);
      vector<Sizes> sizes;
      if (!problem_of([&] { sizes = stage_sizes(units, model, shape, o.gpus, chunks); }).empty())
        continue; // a stage without a layer
      for (int64_t cp = 1; cp <= plane; cp *= 2)
        for (const char* weights: {"keep", "reshard"})
          for (const char* recompute: {"none", "layer"})
            for (int64_t rows = 1; rows <= given.training.global_batch; rows *= 2) {
              const int64_t dp = plane / cp;
              if (!divides(cp, plane) ||
                !divides(cp == 1 ? 1 : 2 * cp, given.data.sequence_length) ||
                !divides(rows * dp, given.training.global_batch) ||
                (plane == 1 && weights != string("keep")) || (cp > 1 && rows > 1) ||
                (pp > 1 && given.training.global_batch / (rows * dp) < 2 * pp))
                continue;
              config.parallel.cp = cp;
              config.parallel.weights = weights;
              config.parallel.recompute = recompute;
              config.training.micro_batch = rows;
              const StepPlan plan = plan_step(config, model, size, dp, chunks, sizes);
              least = min(least, plan.worst());
              if (plan.worst() <= o.memory * kGiB * (1 - o.reserve))
                fitting.push_back({config.parallel, rows, plan});
            }
    }
  }
  PITH_CHECK(isfinite(least), "no layout divides {} GPUs, global_batch {} and {} experts", o.gpus,
    given.training.global_batch, model.num_experts);
  if (fitting.empty())
    PITH_FAIL_HINT("more GPUs, shorter sequences, or fewer layers",
      "no layout fits {} GPUs of {} GiB; the smallest takes {:.1f} GiB", o.gpus, o.memory,
      least / kGiB);
  ranges::stable_sort(
    fitting, {}, [](const Candidate& candidate) { return candidate.plan.seconds; });
  fmt::print("{} layouts fit {} GPUs of {} GiB ({:.0f} % kept free); the quickest:\n\n",
    fitting.size(), o.gpus, o.memory, 100 * o.reserve);
  fmt::print("  pp  cp  ep  dp  weights  recompute  micro_batch  GiB/GPU  s/step   tok/s\n");
  const double tokens = real(given.training.global_batch * given.data.sequence_length);
  for (const auto& [p, rows, plan]: fitting | std::views::take(o.limit))
    fmt::print("  {:<3} {:<3} {:<3} {:<3} {:<8} {:<10} {:>11}  {:>7.1f}  {:>6.3f}  {:>6}\n", p.pp,
      p.cp, p.ep, o.gpus / p.pp / p.cp, p.weights, p.recompute, rows, plan.worst() / kGiB,
      plan.seconds, human(tokens / plan.seconds));
}
}

void print_plan(const RunConfig& config, int64_t processes) {
  with_family(
    config.model.config, [&]<class Model>() { return print_plan_of<Model>(config, processes); });
}

void add_estimate_command(CLI::App& app) {
  const auto [sub, o] = add_command<Options>(app, "estimate",
    "List the layouts of a run that fit so many GPUs, the quickest first",
    [](const Options& options) {
    const RunConfig config =
      parse_run_config(read_file(options.file), options.file, options.overrides);
    with_family(
      config.model.config, [&]<class Model>() { return estimate<Model>(options, config); });
  });
  sub->add_option("config", o->file, "Run configuration (TOML)")->required();
  sub->add_option("--set", o->overrides, "Override one key")->allow_extra_args(false);
  sub->add_option("--gpus", o->gpus, "Number of GPUs (default 1)")->check(CLI::Range(1, 1 << 20));
  sub->add_option("--memory", o->memory, "GiB of each (default 139, an H200)");
  sub->add_option("--reserve", o->reserve, "Share kept free, fragmentation and all (default 0.06)");
  sub->add_option("--limit", o->limit, "Layouts to list (default 10)");
  sub->footer(
    "[parallel] and training.micro_batch are searched; times are those of a cost model of H200 "
    "with NVLink.\nOne layout's memory by cause: pretrain --dry-run.\n"
    "Example: pithtrain estimate examples/qwen3_30b_a3b.toml --gpus 8 --memory 139");
}
}
