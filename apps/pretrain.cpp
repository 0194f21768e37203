// pithtrain pretrain: the training loop.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <fstream>

#include "apps/commands.h"
#include "apps/families.h"
#include "core/device.h"
#include "engine/batches.h"
#include "engine/lr_schedule.h"
#include "engine/metrics.h"
#include "engine/optimizer.h"
#include "engine/pipeline.h"
#include "engine/signals.h"
#include "engine/training_state.h"

namespace pith {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

at::ScalarType compute_dtype(const RunConfig& config) {
  return config.model.dtype == "float32" ? at::kFloat : at::kBFloat16;
}

std::string with_unit(double value) {
  const char* units[] = {"", " k", " M", " G"};
  size_t unit = 0;
  for (; value >= 1000 && unit < 3; ++unit) value /= 1000;
  return fmt::format("{:.{}f}{}", value, unit == 0 ? 0 : 2, units[unit]);
}

// Bytes of one process that holds everything, in GiB by cause. Activations: one micro-batch.
void print_plan(const RunConfig& config, const ModelSize& size, at::ScalarType dtype,
                at::Device device) {
  constexpr double kGib = 1 << 30;
  const auto parameters = static_cast<double>(size.parameters);
  const auto width = static_cast<double>(c10::elementSize(dtype));
  const int64_t micro_batches =
      div_exact(config.training.global_batch, config.training.micro_batch);
  const auto tokens =
      static_cast<double>(config.training.micro_batch * config.data.sequence_length);
  const double weights = parameters * width / kGib, gradients = parameters * 4 / kGib;
  const double optimizer = parameters * 12 / kGib;
  const double activations =
      tokens * static_cast<double>(size.activations_per_token) * width / kGib;
  fmt::print(
      "\n# parameters  {} total, {} active per token; {} FLOP per token (forward and backward)\n",
      with_unit(parameters), with_unit(static_cast<double>(size.active_parameters)),
      with_unit(size.flops_per_token));
  fmt::print("# device      {}\n", describe_device(device));
  fmt::print(
      "# memory      rank 0: {:.2f} GiB = weights {:.2f} + gradients {:.2f} + masters and moments "
      "{:.2f} "
      "+ activations {:.2f}\n",
      weights + gradients + optimizer + activations, weights, gradients, optimizer, activations);
  fmt::print("# step        {} sequences x {} tokens = {} micro-batches of {}\n",
             config.training.global_batch, config.data.sequence_length, micro_batches,
             config.training.micro_batch);
  const std::vector<Action> schedule = make_schedule(1, 0, std::min<int64_t>(micro_batches, 8), false);
  fmt::print("# schedule    rank 0: {}{}\n", to_string(schedule), micro_batches > 8 ? " ..." : "");
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream stream(path, std::ios::binary);
  stream << text;
  stream.flush();
  PITH_CHECK(stream, "cannot write {}", path.string());
}

std::string read_text(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  PITH_CHECK(stream, "cannot read {}", path.string());
  return {std::istreambuf_iterator<char>(stream), {}};
}

// One training run: everything that lives from the first to the last step.
template <class Model>
class Run {
 public:
  Run(const RunConfig& config, typename Model::Config model_config, const Mesh& mesh)
      : config_(config),
        mesh_(mesh),
        folder_(config.run.folder),
        corpus_(config.data.train),
        model_(model_config, whole_model(model_config.num_layers, model_config.num_experts)),
        groups_(make_shard_groups(model_.parameter_units(), compute_dtype(config), mesh.device,
                                  ShardGroup::Use::training)),
        pipeline_(model_, mesh_, config.data.sequence_length,
                  {config.training.balance_loss, config.training.force_balance}),
        rows_(corpus_, config.data.sequence_length, config.data.seed, config.data.document_mask,
              true) {
    check_vocabulary(corpus_);
    if (!config.data.validation.empty() && config.validation.interval > 0) {
      const Corpus validation(config.data.validation);
      check_vocabulary(validation);
      validation_.emplace(validation, config.data.sequence_length, config.data.seed,
                          config.data.document_mask, false);
    }
    state_.corpus_fingerprint = corpus_.fingerprint();
    state_.sequence_length = config.data.sequence_length;
    state_.data_seed = config.data.seed;
    state_.document_mask = config.data.document_mask;
  }

  int train(Clock::time_point launched) {
    fs::create_directories(folder_);
    const std::string origin = load_or_initialize();
    write_text(folder_ / "config.toml", to_toml(config_));
    MetricsLog log(folder_, state_.step, config_.log.tensorboard);
    log.event("start", fmt::format("{}; {}; weights ready {:.1f} s after launch", origin,
                                   describe_device(mesh_.device), seconds_since(launched)));
    if (config_.training.force_balance)
      log.event("warning",
                "training.force_balance replaces the router's choice: for measurements only");
    std::vector<MicroBatch> batch;
    while (state_.step < config_.training.steps && !stop_requested()) {
      const auto start = Clock::now();
      if (batch.empty()) batch = next_batch(0);
      StepMetrics metrics = step(batch);
      metrics.seconds = seconds_since(start);
      metrics.mfu = model_flops(metrics.tokens) / metrics.seconds / peak_flops(mesh_.device);
      if (!std::isfinite(metrics.mfu)) metrics.mfu = 0;
      if (validation_ && (state_.step % config_.validation.interval == 0 || done()))
        metrics.extra.emplace_back("validation/loss", validation_loss());
      log.write(metrics);
      if (config_.checkpoint.save && checkpoint_due()) save(log);
    }
    if (config_.checkpoint.save && state_.step > saved_step_) save(log);  // the end, or a signal
    writer_.finish();
    if (stop_requested())
      log.event("stop", fmt::format("stopped by a signal after step {}", state_.step));
    return 0;
  }

 private:
  bool done() const { return state_.step >= config_.training.steps; }

  bool checkpoint_due() const {
    return config_.checkpoint.interval > 0 && state_.step % config_.checkpoint.interval == 0;
  }

  double model_flops(int64_t tokens) const {
    return model_.config().size(config_.data.sequence_length).flops_per_token *
           static_cast<double>(tokens);
  }

  void check_vocabulary(const Corpus& corpus) const {
    PITH_CHECK(corpus.vocab_size() <= model_.config().vocab_size,
               "the corpus {} has a vocabulary of {}, the model only {}", corpus.prefix(),
               corpus.vocab_size(), model_.config().vocab_size);
  }

  // Rows of the step after the next `ahead` ones.
  std::vector<MicroBatch> next_batch(int64_t ahead) const {
    return make_batch(rows_, state_.rows_read + ahead * config_.training.global_batch,
                      config_.training.global_batch, config_.training.micro_batch,
                      config_.data.document_mask, mesh_.device);
  }

  std::string load_or_initialize() {
    std::vector<std::string> skipped;
    const auto newest = newest_checkpoint(folder_ / "checkpoints", &skipped);
    for (const std::string& reason : skipped) fmt::print(stderr, "warning: {}\n", reason);
    if (newest && !config_.checkpoint.resume) {
      PITH_FAIL_HINT("choose another run.folder, or set checkpoint.resume = true",
                     "{} already holds checkpoints and checkpoint.resume is off", folder_.string());
    }
    if (newest) {
      const fs::path file = *newest / "training_state.json";
      const TrainingState saved = TrainingState::from_json(read_text(file), file.string());
      saved.check_same_data(state_, newest->string());
      check_same_model(*newest);
      restore_state(groups_, *newest);
      state_ = saved;
      saved_step_ = saved.step;
      return fmt::format("resumed from {} at step {}", newest->string(), state_.step);
    }
    if (!config_.model.init.empty()) {
      restore_weights(groups_, config_.model.init, model_.config().tie_embeddings);
      return "weights of " + config_.model.init;
    }
    for (ShardGroup& group : groups_) {
      group.initialize(config_.training.seed, config_.training.init_std,
                       model_.config().num_layers);
    }
    return fmt::format("random weights, seed {}", config_.training.seed);
  }

  void check_same_model(const fs::path& checkpoint) const {
    const auto saved = Model::Config::parse_file(checkpoint);
    const auto dtype = compute_dtype(config_);
    if (saved.to_json(dtype) != model_.config().to_json(dtype)) {
      PITH_FAIL_HINT("restore model.config, or choose another run.folder",
                     "{} was saved with another model configuration than model.config = {}",
                     checkpoint.string(), config_.model.config);
    }
  }

  // One update. The next batch is made while the device works; `batch` holds it afterwards.
  StepMetrics step(std::vector<MicroBatch>& batch) {
    zero_grads(groups_);
    const BatchResult result = pipeline_.forward_backward(batch, NextTokenLoss());
    const Tensor norm = grad_norm(groups_, mesh_);
    StepMetrics metrics;
    metrics.step = state_.step + 1;
    metrics.total_steps = config_.training.steps;
    for (const MicroBatch& micro : batch) metrics.tokens += micro.num_tokens();
    metrics.trained_tokens = batch.front().global_trained_tokens;
    const std::vector<MicroBatch> current = std::move(batch);
    batch = next_batch(1);

    metrics.grad_norm = norm.item<double>();
    metrics.loss = result.loss_sum.item<double>() /
                   static_cast<double>(std::max<int64_t>(metrics.trained_tokens, 1));
    if (result.balance_sum.defined()) {
      metrics.balance_loss =
          result.balance_sum.item<double>() /
          static_cast<double>(config_.training.global_batch * result.num_moe_layers);
    }
    if (config_.log.check_finite &&
        !(std::isfinite(metrics.loss) && std::isfinite(metrics.grad_norm)))
      fail_non_finite(current, metrics);
    metrics.lr = learning_rate(config_.training, metrics.step);
    optimizer_step(groups_, config_.training, metrics.lr, metrics.step, norm);
    synchronize(mesh_.device);

    state_.step = metrics.step;
    state_.rows_read += config_.training.global_batch;
    state_.tokens_seen += metrics.tokens;
    metrics.tokens_seen = state_.tokens_seen;
    const MemoryUse memory = memory_use(mesh_.device);
    metrics.memory_gib = memory.current_gib;
    metrics.memory_peak_gib = memory.peak_gib;
    return metrics;
  }

  // Runs the forward pass again, looking at every stage, to name the first tensor that is not
  // finite.
  [[noreturn]] void fail_non_finite(const std::vector<MicroBatch>& batch,
                                    const StepMetrics& metrics) {
    std::string first = first_non_finite(groups_);
    if (!first.starts_with("weight")) {
      std::string stage;
      pipeline_.observe([&](const std::string& name, const Tensor& tensor) {
        if (stage.empty() && !tensor.isfinite().all().item<bool>()) stage = "output " + name;
      });
      pipeline_.forward_only(batch, NextTokenLoss());
      if (!stage.empty()) first = stage;
    }
    PITH_FAIL_HINT(
        "the weights and the last checkpoint are untouched by this step; lower the learning rate "
        "or "
        "look at the data of this step",
        "step {}: loss {} and gradient norm {} are not finite; first NaN or Inf in {} (rows {} to "
        "{})",
        metrics.step, metrics.loss, metrics.grad_norm, first.empty() ? "the loss" : first,
        state_.rows_read, state_.rows_read + config_.training.global_batch - 1);
  }

  double validation_loss() {
    const int64_t rows =
        std::max<int64_t>(1, config_.validation.tokens / config_.data.sequence_length);
    double sum = 0;
    int64_t trained = 0;
    for (int64_t first = 0; first < rows; first += config_.training.micro_batch) {
      const int64_t count = std::min(config_.training.micro_batch, rows - first);
      const auto batch =
          make_batch(*validation_, first, count, count, config_.data.document_mask, mesh_.device);
      sum += pipeline_.forward_only(batch, NextTokenLoss()).loss_sum.template item<double>();
      trained += batch.front().trained_tokens;
    }
    return sum / static_cast<double>(std::max<int64_t>(trained, 1));
  }

  void save(MetricsLog& log) {
    const auto start = Clock::now();
    CheckpointContent content;
    content.step = state_.step;
    collect_state(groups_, content);
    content.training_state = state_.to_json();
    content.files.emplace_back("config.json", model_.config().to_json(compute_dtype(config_)));
    content.files.emplace_back("generation_config.json", model_.config().generation_json());
    content.files.emplace_back("run.toml", to_toml(config_));
    for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
      const fs::path file = fs::path(corpus_.prefix() + ".tokenizer") / name;
      if (fs::exists(file)) content.files.emplace_back(name, read_text(file));
    }
    writer_.start(folder_ / "checkpoints", std::move(content), config_.checkpoint.keep_last);
    saved_step_ = state_.step;
    log.event("save",
              fmt::format("checkpoint of step {} on its way to {} (copied in {:.2f} s)",
                          state_.step, (folder_ / "checkpoints").string(), seconds_since(start)));
  }

  const RunConfig& config_;
  const Mesh& mesh_;
  fs::path folder_;
  Corpus corpus_;
  Model model_;
  std::vector<ShardGroup> groups_;
  Pipeline<Model> pipeline_;
  RowStream rows_;
  std::optional<RowStream> validation_;
  TrainingState state_;
  int64_t saved_step_ = 0;
  CheckpointWriter writer_;
};

template <class Model>
int pretrain(const RunConfig& config, bool dry_run, Clock::time_point launched) {
  if (config.run.threads > 0) at::set_num_threads(static_cast<int>(config.run.threads));
  Mesh mesh;
  mesh.device = select_device(config.run.device);
  if (config.training.deterministic) {
    // cuBLAS sums in one order only with a fixed workspace; LibTorch then refuses what is not
    // deterministic.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(true, false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  }
  auto model_config = Model::Config::parse_file(config.model.config);
  if (config.model.num_layers > 0) model_config.cut_layers(config.model.num_layers);
  PITH_CHECK(config.data.sequence_length <= model_config.max_positions,
             "data.sequence_length {} is longer than the model's max_position_embeddings {}",
             config.data.sequence_length, model_config.max_positions);
  if (dry_run) {
    fmt::print("{}", to_toml(config));
    print_plan(config, model_config.size(config.data.sequence_length), compute_dtype(config),
               mesh.device);
    return 0;
  }
  install_signal_handlers();
  return Run<Model>(config, std::move(model_config), mesh).train(launched);
}

}  // namespace

void add_pretrain_command(CLI::App& app) {
  struct Options {
    std::string file;
    std::vector<std::string> overrides;
    bool dry_run = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "pretrain",
      "Train a model on a corpus; resumes from the newest complete checkpoint of the run folder");
  command->add_option("config", options->file, "Run configuration (TOML); see examples/")
      ->required();
  command->add_option("--set", options->overrides, "Override one key, e.g. --set training.lr=1e-4")
      ->allow_extra_args(false);
  command->add_flag(
      "--dry-run", options->dry_run,
      "Print the resolved configuration, parameter counts, memory and schedule, then exit");
  command->footer(
      "Example: pithtrain pretrain examples/demo.toml --set training.steps=20\n\nKeys:\n" +
      describe_config_keys());
  command->callback([options] {
    const auto launched = Clock::now();
    const RunConfig config = load_run_config(options->file, options->overrides);
    with_family(config.model.config,
                [&]<class Model>() { return pretrain<Model>(config, options->dry_run, launched); });
  });
}

}  // namespace pith
