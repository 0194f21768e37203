// pithtrain pretrain: the training loop.
#include <ATen/Context.h>
#include <ATen/ops/from_blob.h>
#include "apps/plan.h"
#include "build_info.h"
#include "engine/batches.h"
#include "engine/metrics.h"
#include "engine/optimizer.h"

namespace pith {
namespace {
BalanceKind balance_kind(const RunConfig::Training& training) {
  if (training.balance_kind == "global_batch") return BalanceKind::global_batch;
  return training.balance_kind == "sequence" ? BalanceKind::sequence : BalanceKind::micro_batch;
}

vector<RowStream> open_streams(
  const RunConfig& config, const vector<DataSource>& sources, uint64_t seed) {
  const Packing packing = config.data.packing == "best_fit" ? Packing::best_fit : Packing::concat;
  vector<RowStream> streams;
  for (const DataSource& source: sources)
    streams.emplace_back(Corpus(source.path), config.data.sequence_length, seed,
      config.data.document_mask, true, packing);
  return streams;
}

Blend open_blend(const RunConfig& config) {
  vector<double> weights;
  for (const DataSource& source: config.data.train) weights.push_back(source.weight);
  return {open_streams(config, config.data.train, config.data.seed), weights};
}

// Sets the rules of this part's tensors; -> those of the whole model, for a person.
template <class Model>
vector<string> set_update_rules(Model& part, const RunConfig::Training& training) {
  const auto& config = part.config();
  Model whole(config, whole_model(config.num_layers, config.num_experts));
  return set_update_rules(part.parameter_units(), whole.parameter_units(), training);
}

// One training run: everything that lives from the first to the last step.
template <class Model> class Run {
 public:
  Run(const RunConfig& config, typename Model::Config model_config, const Mesh& mesh)
      : config_(config), mesh_(mesh), folder_(config.run.folder),
        chunks_(chunks_of(config, model_config, mesh.shape)),
        part_(model_part(chunks_, mesh.shape, mesh.place, model_config)),
        model_(model_config, part_), rules_(set_update_rules(model_, training_)),
        groups_(make_shard_groups(model_.parameter_units(), compute_dtype(config), mesh,
          ShardGroup::Use::training,
          config.parallel.weights == "reshard" ? ShardMode::reshard : ShardMode::keep,
          optimizer_states(training_))),
        shards_(groups_, part_, part_.head ? &model_.head_weight() : nullptr),
        pipeline_(model_, mesh_, data_.sequence_length,
          {training_.balance_loss, training_.force_balance, balance_kind(training_),
            training_.z_loss},
          chunks_, &shards_, recomputes(config, mesh.place.pp)),
        rows_(open_blend(config)) {
    if (config.validation.interval > 0) // seed 0: the same tokens in all runs
      validation_ = open_streams(config, data_.validation, 0);
    vector<Corpus> corpora;
    for (const auto* streams: {&rows_.sources(), &std::as_const(validation_)})
      for (const RowStream& stream: *streams) corpora.push_back(stream.corpus());
    check_same_tokenizer(corpora);
    for (const Corpus& corpus: corpora)
      PITH_CHECK(corpus.vocab_size() <= model_config.vocab_size,
        "the corpus {} has a vocabulary of {}, the model only {}", corpus.prefix(),
        corpus.vocab_size(), model_config.vocab_size);
    state_.data = {{"data.sequence_length", to_string(data_.sequence_length)},
      {"data.seed", to_string(data_.seed)}, {"data.packing", data_.packing},
      {"data.document_mask", fmt::to_string(data_.document_mask)}};
    for (size_t i = 0; i < rows_.sources().size(); ++i) // a corpus may move, not change
      for (const auto& [what, value]:
        {pair{"fingerprint", corpora[i].fingerprint()}, {"tokenizer", corpora[i].tokenizer_hash()},
          {"weight, as an integer ratio", to_string(rows_.weights()[i])}})
        state_.data[fmt::format("corpus {} of data.train: {}", i + 1, what)] = value;
    state_.schedule = schedule_settings(training_);
    micro_batches_of(config, mesh.dp);
    check_same_everywhere(mesh.world,
      {{"configuration", to_toml(config)},
        {"model", model_.config().to_json(compute_dtype(config))}, {"corpus", state_.to_json()},
        {"build", kBuildDescription}});
  }

  void train(Clock::time_point launched) {
    if (first_rank()) fs::create_directories(folder_);
    const string origin = load_or_initialize();
    if (first_rank()) {
      write_file(folder_, "config.toml", to_toml(config_));
      log_.emplace(folder_, state_.step, config_.log.tensorboard);
    }
    event("start", "{}; {}; weights ready {:.1f} s after launch", origin,
      describe_device(mesh_.device), seconds_since(launched));
    event("optimizer", "{}; moments in {}{}", fmt::join(rules_, "; "), training_.moments,
      training_.ema_decay > 0 ? fmt::format("; average of the weights, {}", training_.ema_decay)
                              : "");
    if (training_.force_balance)
      event("warning", "training.force_balance replaces the router: for measurements only");
    if (balance_kind(training_) == BalanceKind::micro_batch)
      event("warning", "training.balance_kind = micro_batch: results depend on the layout");
    log_data();
    const double flops = model_.config().size(data_.sequence_length).flops_per_token;
    vector<MicroBatch> batch;
    const vector<int64_t>& profiled = config_.profile.steps;
    while (!done() && !stopping_) {
      set_comm_context(fmt::format("step {}", state_.step + 1));
      const auto start = Clock::now();
      if (batch.empty()) batch = next_batch(0);
      if (!profiled.empty() && state_.step + 1 == profiled[0])
        profile_.emplace(ProfileOptions{folder_, mesh_.world.rank(), mesh_.device,
          fmt::format("pp {} dp {} cp {} ep {}", mesh_.place.pp, mesh_.place.dp, mesh_.place.cp,
            mesh_.place.ep),
          config_.profile.tool == "capture", config_.profile.memory});
      StepMetrics metrics = step(batch);
      if (!profiled.empty() && state_.step == profiled[1]) profile_.reset();
      metrics.seconds = seconds_since(start);
      if (const double peak = peak_flops(mesh_.device) * real(mesh_.world.size()); peak > 0)
        metrics.mfu = flops * real(metrics.tokens) / metrics.seconds / peak;
      string validated;
      if (!validation_.empty() && (state_.step % config_.validation.interval == 0 || done()))
        validated = validate(metrics);
      if (log_) log_->write(metrics);
      if (!validated.empty()) event("validation", "{}", validated);
      const int64_t interval = config_.checkpoint.interval;
      if (config_.checkpoint.save && interval > 0 && state_.step % interval == 0) save();
      if (mesh_.world.size() == 1) stopping_ = stop_requested();
    }
    if (config_.checkpoint.save && state_.step > saved_step_) save(); // the end, or a signal
    writer_.finish();
    if (stopping_) event("stop", "stopped by a signal after step {}", state_.step);
  }
 private:
  bool done() const { return state_.step >= last_step_; }
  bool first_rank() const { return mesh_.world.rank() == 0; }
  template <class... Values>
  void event(const char* name, fmt::format_string<Values...> text, Values&&... values) {
    if (log_) log_->event(name, fmt::format(text, std::forward<Values>(values)...));
  }
  // Sums over all ranks; what a rank does not know is 0 there.
  vector<double> sum_over_ranks(vector<double> values) const {
    Tensor sums = at::from_blob(values.data(), {ssize(values)}, kDouble).to(mesh_.device);
    mesh_.world.all_reduce(sums);
    sums = sums.cpu();
    return {sums.const_data_ptr<double>(), sums.const_data_ptr<double>() + sums.numel()};
  }

  // What is read, and the step after which the run ends.
  void log_data() {
    const double total = real(reduce(rows_.weights().begin(), rows_.weights().end()));
    for (size_t i = 0; i < rows_.sources().size(); ++i) {
      const RowStream& stream = rows_.sources()[i];
      event("data", "{}: {:.4g} % of the rows; an epoch is {} tokens in {} rows",
        stream.corpus().prefix(), 100 * real(rows_.weights()[i]) / total,
        stream.corpus().num_tokens(), stream.rows_per_epoch());
    }
    last_step_ = training_.steps;
    if (data_.exhausted == "repeat") return;
    const int64_t rows = rows_.rows_before_repeat();
    PITH_CHECK(rows >= training_.global_batch,
      "data.exhausted = \"stop\", but the data ends after {} rows, before the first step", rows);
    const int64_t left = max<int64_t>(0, rows - state_.rows_read);
    const int64_t end = state_.step + left / training_.global_batch;
    if (end >= last_step_) return;
    last_step_ = end;
    event("data", "a corpus ends after step {} of {}, and the run with it (data.exhausted = stop)",
      last_step_, training_.steps);
  }

  // Rows of the step after the next `ahead` ones.
  vector<MicroBatch> whole_batch(int64_t ahead) const {
    return make_batch(rows_, state_.rows_read + ahead * training_.global_batch,
      training_.global_batch, training_.micro_batch, mesh_.place.dp, mesh_.dp, data_.document_mask,
      whole_device());
  }
  vector<MicroBatch> next_batch(int64_t ahead) const {
    vector<MicroBatch> batch = whole_batch(ahead);
    for (MicroBatch& micro: batch) micro = share_of(std::move(micro));
    return batch;
  }
  // Where whole micro-batches are made: on the CPU if they are split then.
  Device whole_device() const { return mesh_.shape.cp > 1 ? kCPU : mesh_.device; }
  MicroBatch share_of(MicroBatch whole) const {
    if (mesh_.shape.cp == 1) return whole;
    return split_context(
      whole, mesh_.place.cp, mesh_.shape.cp, mesh_.device, model_.config().window);
  }

  string load_or_initialize() {
    string newest;
    if (first_rank()) { // looks for all ranks
      vector<string> skipped;
      newest = newest_checkpoint(folder_ / "checkpoints", &skipped).value_or("").string();
      for (const string& reason: skipped) fmt::print(stderr, "warning: {}\n", reason);
      if (!newest.empty()) check_checkpoint(newest);
    }
    newest = mesh_.world.all_gather_strings(newest)[0];
    if (!newest.empty()) return resume(newest);
    if (!config_.model.init.empty()) {
      const auto& config = model_.config();
      Model whole(config, whole_model(config.num_layers, config.num_experts));
      start_router(Model::Config::parse_file(config_.model.init).router_state);
      restore_weights(groups_, config_.model.init, config.tie_embeddings, whole.parameter_units());
      return "weights of " + config_.model.init;
    }
    start_router({});
    for (ShardGroup& group: groups_)
      group.initialize(training_.seed, training_.init_std, model_.config().num_layers);
    return fmt::format("random weights, seed {}", training_.seed);
  }

  string resume(const fs::path& checkpoint) {
    if (!config_.checkpoint.resume)
      PITH_FAIL_HINT("choose another run.folder, or set checkpoint.resume = true",
        "{} already holds checkpoints and checkpoint.resume is off", folder_);
    const string name = checkpoint.string();
    const fs::path file = checkpoint / "training_state.json";
    TrainingState saved = TrainingState::from_json(read_file(file), file.string());
    if (const auto other = TrainingState::differences(saved.data, state_.data); !other.empty())
      PITH_FAIL_HINT("restore these; or start a new run folder with model.init = this checkpoint",
        "{} cannot be resumed: its position in the data would mean other rows:{}", name, other);
    const string schedule = TrainingState::differences(saved.schedule, state_.schedule);
    if (!schedule.empty() && !config_.checkpoint.allow_schedule_change)
      PITH_FAIL_HINT("restore it, or set checkpoint.allow_schedule_change = true",
        "{} was saved under another learning-rate schedule:{}", name, schedule);
    const auto dtype = compute_dtype(config_);
    if (Model::Config::parse_file(checkpoint).to_json(dtype) != model_.config().to_json(dtype))
      PITH_FAIL_HINT("restore it, or choose another run.folder",
        "{} was saved with another model.config than {}", name, config_.model.config);
    if (training_.ema_decay == 0 && fs::exists(checkpoint / "ema"))
      PITH_FAIL_HINT("set training.ema_decay; or start a new run folder with model.init",
        "{} keeps an average of the weights, which this run would lose", name);
    start_router(Model::Config::parse_file(checkpoint).router_state);
    restore_state(groups_, checkpoint);
    saved.schedule = state_.schedule;
    state_ = std::move(saved);
    saved_step_ = state_.step;
    return fmt::format("resumed from {} at step {}{}{}", name, state_.step,
      schedule.empty() ? "" : ", with another learning-rate schedule:", schedule);
  }

  // One update. The next batch is made while the device works; `batch` holds it afterwards.
  StepMetrics step(vector<MicroBatch>& batch) {
    zero_grads(groups_);
    const BatchResult result = pipeline_.forward_backward(batch, NextTokenLoss());
    const Tensor norm = grad_norm(groups_, mesh_);
    StepMetrics metrics;
    metrics.step = state_.step + 1;
    metrics.total_steps = last_step_;
    metrics.tokens = training_.global_batch * data_.sequence_length;
    metrics.trained_tokens = batch.front().global_trained_tokens;
    const vector<MicroBatch> current = std::move(batch);
    batch = next_batch(1);

    metrics.grad_norm = norm.item<double>();
    const auto value = [](const Tensor& sum) { return sum.defined() ? sum.item<double>() : 0.0; };
    const vector<double> sums = sum_over_ranks({value(result.loss_sum), value(result.balance_sum),
      real(result.num_moe_layers) / real(mesh_.plane.size()), stop_requested() ? 1.0 : 0.0,
      value(result.z_sum)});
    metrics.loss = sums[0] / real(max<int64_t>(metrics.trained_tokens, 1));
    const bool update = update_is_finite(current, metrics);
    use_counts(result, metrics, update);
    if (training_.z_loss > 0)
      metrics.extra.emplace_back("z_loss", sums[4] / real(metrics.trained_tokens));
    if (sums[2] > 0) metrics.balance_loss = sums[1] / real(training_.global_batch) / sums[2];
    stopping_ = sums[3] > 0;
    metrics.lr = learning_rate(training_, metrics.step);
    if (update) optimizer_step(groups_, training_, metrics.lr, ++state_.updates, norm);
    synchronize(mesh_.device);

    state_.step = metrics.step;
    if (training_.skip_non_finite > 0)
      metrics.extra.emplace_back("skipped", real(state_.step - state_.updates));
    state_.rows_read += training_.global_batch;
    state_.tokens_seen += metrics.tokens;
    metrics.tokens_seen = state_.tokens_seen;
    metrics.memory_peak_gib = peak_memory_gib(mesh_.device);
    return metrics;
  }

  // The bias of the next step, from the choices of this one's tokens, if they are to be used.
  void use_counts(const BatchResult& result, StepMetrics& metrics, bool update) {
    const auto& config = model_.config();
    Tensor counts = at::zeros(
      {config.num_layers, config.num_experts}, TensorOptions(mesh_.device).dtype(kDouble));
    if (result.expert_counts.defined()) counts.copy_(result.expert_counts);
    mesh_.world.all_reduce(counts);
    const Tensor total = counts.sum(1, /*keepdim=*/true);
    auto& [bias, shares] = pipeline_.router_state();
    if (update && training_.router_bias_rate > 0)
      bias.add_((counts.mean(1, /*keepdim=*/true) - counts).sign(), training_.router_bias_rate);
    if (update && shares.defined()) shares.copy_(at::where(total > 0, counts / total, shares));
    metrics.expert_counts = counts.index_select(0, total.view(-1).nonzero().view(-1)).cpu();
    const int64_t interval = config_.log.expert_counts;
    metrics.all_counts = interval > 0 && metrics.step % interval == 0;
  }

  // Of weights that are about to be trained.
  void start_router(const RouterState& saved) {
    const auto& config = model_.config();
    const vector<int64_t> shape{config.num_layers, config.num_experts};
    auto& [bias, shares] = pipeline_.router_state();
    const auto options = TensorOptions(mesh_.device);
    for (const Tensor* table: {&saved.bias, &saved.shares})
      if (table->defined())
        check_shape(*table, "router_state of the weights", {shape[0], shape[1]});
    bias = saved.bias.defined() ? saved.bias.to(mesh_.device) : Tensor(); // not model.config's
    if (training_.router_bias_rate > 0 && !bias.defined()) bias = at::zeros(shape, options);
    if (balance_kind(training_) != BalanceKind::global_batch) return;
    const Tensor even = at::full(shape, 1 / real(shape[1]), options.dtype(kDouble));
    shares = saved.shares.defined() ? saved.shares.to(mesh_.device) : even;
  }

  // The first weight, stage output (of another forward pass) or gradient that is not finite.
  string non_finite(const vector<MicroBatch>& batch) {
    const auto first_of_ranks = [&](const string& mine) {
      const vector<string> all = mesh_.world.all_gather_strings(mine);
      const auto first = ranges::find_if_not(all, &string::empty);
      if (first == all.end() || all.size() == 1) return mine;
      return fmt::format("{} on rank {}", *first, first - all.begin());
    };
    string first = first_of_ranks(first_non_finite(groups_));
    if (first.starts_with("weight")) return first;
    string stage;
    pipeline_.observe([&](const string& name, const Tensor& tensor) {
      if (stage.empty() && !tensor.isfinite().all().item<bool>()) stage = "output " + name;
    });
    pipeline_.forward_only(batch, NextTokenLoss());
    pipeline_.observe({});
    stage = first_of_ranks(stage);
    return stage.empty() ? first : stage;
  }

  // Whether this step updates anything; the same on all ranks, as loss and norm are.
  bool update_is_finite(const vector<MicroBatch>& batch, const StepMetrics& metrics) {
    const double loss = metrics.loss, norm = metrics.grad_norm;
    const bool finite = isfinite(loss) && isfinite(norm);
    if (finite) state_.skipped_in_row = 0;
    if (finite || (!config_.log.check_finite && training_.skip_non_finite == 0)) return true;
    if (++state_.skipped_in_row <= training_.skip_non_finite) {
      event("skipped", "step {}: loss {}, gradient norm {}: no update; {} in a row, {} in all",
        metrics.step, loss, norm, state_.skipped_in_row, metrics.step - state_.updates);
      return false;
    }
    const string first = non_finite(batch);
    PITH_FAIL_HINT("this step changed no weights; lower the learning rate or look at its data",
      "step {}: loss {} and gradient norm {} are not finite; first NaN or Inf in {} (rows {} to "
      "{})",
      state_.step + 1, loss, norm, first.empty() ? "the loss" : first, state_.rows_read,
      state_.rows_read + training_.global_batch - 1);
  }

  // Loss and perplexity by corpus, mean loss of all tokens; each time of the same rows, once each.
  string validate(StepMetrics& metrics) {
    string text;
    double all = 0, all_trained = 0;
    const int64_t mine = training_.micro_batch;
    const int64_t wanted = config_.validation.tokens / data_.sequence_length;
    for (size_t i = 0; i < validation_.size(); ++i) {
      const RowStream& stream = validation_[i];
      const int64_t rows = max<int64_t>(1, min(wanted, stream.rows_per_epoch()));
      double sum = 0, trained = 0;
      for (int64_t first = 0; first < rows; first += mine * mesh_.dp) {
        vector<Row> part; // this data-parallel rank's; beyond the end rows that count nothing
        for (int64_t row = first + mesh_.place.dp * mine; ssize(part) < mine; ++row) {
          part.push_back(stream.row(min(row, rows - 1)));
          if (row >= rows) ranges::fill(part.back().labels, -100);
        }
        const vector<MicroBatch> batch{
          share_of(make_microbatch(part, data_.document_mask, 1, 1, whole_device()))};
        const Tensor loss = pipeline_.forward_only(batch, NextTokenLoss()).loss_sum;
        if (!loss.defined()) continue;
        sum += loss.item<double>();
        trained += real(batch.front().trained_tokens);
      }
      const vector<double> sums = sum_over_ranks({sum, trained});
      const double loss = sums[0] / max(sums[1], 1.0);
      const string name = data_.validation[i].label();
      metrics.extra.emplace_back(fmt::format("validation/{}/loss", name), loss);
      metrics.extra.emplace_back(fmt::format("validation/{}/perplexity", name), std::exp(loss));
      text += fmt::format("{} loss {:.4f}, perplexity {:.4g}; ", name, loss, std::exp(loss));
      all += sums[0], all_trained += sums[1];
    }
    all /= max(all_trained, 1.0);
    metrics.extra.emplace_back("validation/loss", all);
    return text + fmt::format("mean loss {:.4f} over {} tokens", all, all_trained);
  }

  void save() {
    const auto start = Clock::now();
    const auto& model = model_.config();
    CheckpointContent content;
    content.step = state_.step;
    content.training_state = state_.to_json();
    content.files = {
      {"config.json",
        with_router_state(model.to_json(compute_dtype(config_)), pipeline_.router_state())},
      {"generation_config.json", model.generation_json()}, {"run.toml", to_toml(config_)}};
    collect_state(groups_, content, mesh_.expert);
    for (const char* name: {"tokenizer.json", "tokenizer_config.json"}) {
      const fs::path file = fs::path(data_.train.front().path + ".tokenizer") / name;
      if (fs::exists(file)) content.files.emplace_back(name, read_file(file));
    }
    const fs::path root = folder_ / "checkpoints";
    writer_.start(root, std::move(content), config_.checkpoint.keep_last, mesh_.world);
    saved_step_ = state_.step;
    event("save", "checkpoint of step {} on its way to {} (copied in {:.2f} s)", state_.step, root,
      seconds_since(start));
  }

  const RunConfig& config_;
  const RunConfig::Data& data_ = config_.data;
  const RunConfig::Training& training_ = config_.training;
  const Mesh& mesh_;
  fs::path folder_;
  vector<int64_t> chunks_;
  ModelPart part_;
  Model model_;
  vector<string> rules_; // of the optimizer, for a person
  vector<ShardGroup> groups_;
  ModelShards shards_;
  Pipeline<Model> pipeline_;
  Blend rows_;
  vector<RowStream> validation_;
  TrainingState state_;
  int64_t saved_step_ = 0, last_step_ = 0;
  bool stopping_ = false; // agreed by all ranks
  optional<Profile> profile_;
  optional<MetricsLog> log_; // on the first rank
  CheckpointWriter writer_;
};

template <class Model>
void pretrain(const RunConfig& config, const World& world, Clock::time_point launched) {
  if (config.run.threads > 0) at::set_num_threads(int(config.run.threads));
  const Device device = select_device(config.run.device);
  if (config.training.deterministic) {
    // cuBLAS sums in one order only with a fixed workspace.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(true, false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  }
  auto model_config = planned_model<typename Model::Config>(config);
  const Mesh mesh = make_mesh(mesh_shape(config.parallel), world, device);
  install_signal_handlers();
  Run<Model>(config, std::move(model_config), mesh).train(launched);
}

// As `trace --tokens` reads them.
void print_rows(const RunConfig& config, const pair<int64_t, int64_t>& first_and_count) {
  const Blend blend = open_blend(config);
  vector<vector<vector<int64_t>>> tokens, labels;
  for (int64_t i = 0; i < first_and_count.second; ++i) {
    Row row = blend.row(first_and_count.first + i);
    auto &documents = tokens.emplace_back(), &answers = labels.emplace_back();
    row.document_begins.push_back(ssize(row.tokens));
    for (size_t d = 0; d + 1 < row.document_begins.size(); ++d) {
      const int64_t begin = row.document_begins[d], end = row.document_begins[d + 1];
      documents.emplace_back(row.tokens.begin() + begin, row.tokens.begin() + end);
      answers.emplace_back(row.labels.begin() + begin, row.labels.begin() + end);
    }
  }
  fmt::print("{{\"rows\": {},\n\"labels\": {}}}\n", tokens, labels);
}
}

void add_pretrain_command(CLI::App& app) {
  struct Options {
    string file;
    vector<string> overrides;
    bool dry_run = false;
    int64_t processes = 1;
    pair<int64_t, int64_t> rows{0, -1};
  };
  const auto [sub, o] = add_command<Options>(app, "pretrain",
    "Train a model on a corpus; resumes from the newest complete checkpoint of the run folder",
    [](const Options& options) {
    const auto launched = Clock::now();
    // First of all, so that what goes wrong in a job of many ranks is told once.
    const bool plans = options.dry_run || options.rows.second >= 0;
    const auto world = plans ? nullptr : make_unique<World>();
    const RunConfig config =
      parse_run_config(read_file(options.file), options.file, options.overrides);
    if (options.rows.second >= 0) return print_rows(config, options.rows);
    if (!world) {
      fmt::print("{}", to_toml(config));
      return print_plan(config, options.processes);
    }
    with_family(config.model.config,
      [&]<class Model>() { return pretrain<Model>(config, *world, launched); });
  });
  sub->add_option("config", o->file, "Run configuration (TOML); see examples/")->required();
  sub->add_option("--set", o->overrides, "Override one key, e.g. --set training.lr=1e-4")
    ->allow_extra_args(false);
  sub->add_flag("--dry-run", o->dry_run,
    "Print the resolved configuration, parameter counts, memory and schedule, then exit");
  sub->add_option("--processes", o->processes, "--dry-run: of a job of this many")
    ->check(CLI::PositiveNumber);
  sub
    ->add_option("--rows", o->rows,
      "FIRST COUNT: print these rows of the data as JSON, as `trace --tokens` reads it, then "
      "exit")
    ->check(CLI::Range(int64_t{0}, int64_t{1'000'000'000})); // tokens before it fit int64
  sub->footer("Example: pithtrain pretrain examples/demo.toml --set training.steps=20\n\nKeys:\n" +
    describe_config_keys());
}
}
