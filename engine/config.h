// The run configuration: one typed struct, read from TOML; mistakes are named by file, line, key.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace pith {

// One corpus of several.
struct DataSource {
  std::string path;       // without extension
  double weight = 1;      // of its rows in the blend; means nothing for validation
  std::string name = {};  // in metrics; empty = the last part of path
  std::string label() const {
    return name.empty() ? std::filesystem::path(path).filename().string() : name;
  }
};

// Defaults are the values below; docs/configuration.md and `pithtrain pretrain --help` are made
// from the table in config.cpp, so each field has one description, one range, one place.
struct RunConfig {
  struct Run {
    std::string folder = "runs/run";
    std::string device = "auto";  // auto, cpu, cuda
    int64_t threads = 0;          // CPU threads; 0 = all
  } run;
  struct Model {
    std::string config;              // config.json, or a folder that holds one
    std::string init;                // weights: a Hugging Face folder or checkpoint; empty = random
    std::string dtype = "bfloat16";  // compute dtype: bfloat16, float32
    int64_t num_layers = 0;          // cut to the first N layers; 0 = all
  } model;
  struct Parallel {  // processes = pp x dp x cp; dp follows from their number
    int64_t pp = 1, cp = 1, ep = 1;
    std::string sharding = "fsdp";  // fsdp: over all ranks of a stage; hsdp: within blocks of them
    int64_t hsdp_size = 0;
    std::string weights = "keep";  // between uses: keep them whole, or reshard
    std::string chunks;            // layers of each of 2 pp chunks: "2,2,4,0"; empty = by cost
  } parallel;
  struct Data {
    std::vector<DataSource> train, validation;
    int64_t sequence_length = 4096;
    bool document_mask = true;         // attention and positions stop at document borders
    uint64_t seed = 1;                 // order of documents
    std::string packing = "concat";    // concat, best_fit
    std::string exhausted = "repeat";  // repeat, stop
  } data;
  struct Training {
    int64_t steps = 1000;
    int64_t global_batch = 32;  // sequences a step
    int64_t micro_batch = 1;    // sequences a micro-batch
    double lr = 3e-4;
    std::string schedule = "cosine";  // constant, cosine, wsd
    int64_t warmup_steps = 0;
    int64_t decay_steps = 0;        // wsd: length of the decay at the end
    double min_lr_ratio = 0.1;      // floor of the decay, as a share of lr
    double weight_decay = 0.1;      // matrices, experts, embeddings
    double weight_decay_other = 0;  // norms, biases, router
    double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8;
    double clip_norm = 1.0;      // 0 = off
    double balance_loss = 1e-3;  // coefficient of the load-balance loss
    bool force_balance = false;  // ignore the router's choice: for measurements only
    bool deterministic = false;  // bit-identical when repeated
    uint64_t seed = 1;           // initialisation
    double init_std = 0.02;
  } training;
  struct Validation {
    int64_t interval = 0;  // steps; 0 = never
    int64_t tokens = 65536;
  } validation;
  struct Checkpoint {
    int64_t interval = 0;   // steps; 0 = only at the end
    int64_t keep_last = 2;  // 0 = all
    bool resume = true;     // continue from the newest complete checkpoint of run.folder
    bool save = true;       // false: never write one (benchmarks)
    bool allow_schedule_change = false;  // of the learning rate, on resume
  } checkpoint;
  struct Log {
    bool tensorboard = true;
    bool check_finite = true;  // stop at the first NaN or Inf, naming the tensor
  } log;
};

// Reads a TOML file, then applies overrides "section.key=value" (the value is TOML; text may come
// without quotes). Throws one Error that lists every mistake: file:line, key, what is wrong, the
// nearest valid key or the allowed values. Relative paths in the file are relative to the working
// directory, like on the command line.
RunConfig load_run_config(const std::filesystem::path& file,
                          const std::vector<std::string>& overrides);

// The same from the text of a file; `source` is its name in errors.
RunConfig parse_run_config(std::string_view text, const std::string& source,
                           const std::vector<std::string>& overrides);

// The whole configuration as TOML, every key with its value: written to the run folder, printed by
// --dry-run. load_run_config of this text gives the same configuration.
std::string to_toml(const RunConfig& config);

// One line per key: name, type, default, range, description. For --help.
std::string describe_config_keys();

// The whole of docs/configuration.md, which `pithtrain --config-reference` prints.
std::string config_reference();

// The candidate with the fewest edits (insert, delete, replace, swap) from `word`; ties: the first.
std::string nearest_word(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace pith
