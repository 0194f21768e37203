// The run configuration: one typed struct, read from TOML; mistakes are named by file, line, key.
#pragma once
namespace pith {
// One corpus of several.
struct DataSource {
  string path; // without extension
  double weight = 1; // of its rows in the blend; means nothing for validation
  string name = {}; // in metrics; empty = the last part of path
  string label() const { return name.empty() ? fs::path(path).filename().string() : name; }
};

// Tensors that are trained in another way than the rest.
struct TensorGroup {
  string pattern; // ECMAScript regular expression, searched in the Hugging Face name
  string optimizer = {}; // adamw or muon; empty: as without the group
  double lr_scale = 1;
  double weight_decay = -1; // negative: as without the group
};

// Defaults; descriptions and ranges stand in the table of config.cpp.
struct RunConfig {
  struct Run {
    string folder = "runs/run", device = "auto";
    int64_t threads = 0;
  } run;
  struct Model {
    string config, init, dtype = "bfloat16";
    int64_t num_layers = 0;
  } model;
  struct Parallel { // processes = pp x dp x cp; dp follows from their number
    int64_t pp = 1, cp = 1, ep = 1;
    string sharding = "fsdp", weights = "keep", chunks, recompute = "none";
    int64_t hsdp_size = 0;
    double head_share = 0;
  } parallel;
  struct Data {
    vector<DataSource> train, validation;
    int64_t sequence_length = 4096;
    bool document_mask = true;
    uint64_t seed = 1;
    string packing = "concat", exhausted = "repeat";
  } data;
  struct Training {
    int64_t steps = 1000, global_batch = 32, micro_batch = 1; // batches in sequences
    double lr = 3e-4;
    string schedule = "cosine", decay_shape = "linear";
    int64_t warmup_steps = 0, decay_steps = 0;
    double min_lr_ratio = 0.1, weight_decay = 0.1, weight_decay_other = 0;
    string optimizer = "adamw", moments = "float32";
    vector<TensorGroup> groups;
    double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, muon_momentum = 0.95, clip_norm = 1.0;
    double ema_decay = 0;
    int64_t skip_non_finite = 0;
    double balance_loss = 1e-3, z_loss = 0, router_bias_rate = 0;
    string balance_kind = "sequence";
    bool force_balance = false, deterministic = false;
    uint64_t seed = 1;
    double init_std = 0.02;
  } training;
  struct Validation {
    int64_t interval = 0, tokens = 65536;
  } validation;
  struct Checkpoint {
    int64_t interval = 0, keep_last = 2;
    bool resume = true, save = true, allow_schedule_change = false;
  } checkpoint;
  struct Log {
    bool tensorboard = true, check_finite = true;
    int64_t expert_counts = 100;
  } log;
  struct Profile {
    vector<int64_t> steps;
    string tool = "trace";
    bool memory = false;
  } profile;
};

// Reads TOML, of a file called `source` in errors, then overrides "section.key=value" (TOML; text
// may come without quotes). One Error lists every mistake: file:line, key, what is wrong, the
// nearest valid key or the allowed values.
RunConfig parse_run_config(string_view text, const string& source, const vector<string>& overrides);

// Of tensors' names: ECMAScript without back-references, found in polynomial time.
regex name_pattern(const string& text);

// As TOML, which reads back to the same.
string to_toml(const RunConfig& config);

// A line a key: name, type, default, range, description. For --help and docs/configuration.md.
string describe_config_keys();
}
