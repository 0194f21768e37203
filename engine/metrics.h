// What a run tells: a progress line, metrics.jsonl, TensorBoard event files, profiles; and how it
// is asked to stop.
#pragma once
#include <ATen/record_function.h>
#include "core/tensor.h"
#include "engine/file_io.h"

namespace pith {
using Scalars = vector<pair<string, double>>;

struct StepMetrics {
  int64_t step = 0, total_steps = 0;
  double loss = 0; // mean over the global batch's trained tokens, without balance loss
  double balance_loss = 0; // mean over MoE layers, without its coefficient; 1 = balanced
  double grad_norm = 0; // before clipping
  double lr = 0;
  int64_t tokens = 0, trained_tokens = 0; // of this step; tokens: all inputs
  int64_t tokens_seen = 0; // since the start of the run
  double seconds = 0; // of this step
  double mfu = 0; // 0 .. 1; 0 = peak not known
  double memory_peak_gib = 0;
  Scalars extra; // "validation/loss", ...
  // (MoE layers, E) float64 on the CPU: choices of this step, or undefined; all_counts: write them,
  // not only what they come to
  Tensor expert_counts;
  bool all_counts = false;
};

// Logging never stops training: a sink that can't be written is reported once and left out.
//
// metrics.jsonl, a JSON object a line, flushed at once: of a step the fields of StepMetrics, "time"
// (Unix seconds), "tokens_per_second" and the extra values; "expert_load" has, for each MoE layer,
// the largest load over the mean, the entropy of the loads over that of even ones, the experts
// without tokens and at times all counts. What is not finite is null, and stands in "nonfinite":
// {"loss": "nan"}.
class MetricsLog {
 public:
  // Appends to run_folder/metrics.jsonl, cut off before the first step after `resumed_step` or a
  // half-written line; for TensorBoard makes a new event file.
  MetricsLog(const fs::path& run_folder, int64_t resumed_step, bool tensorboard);
  void write(const StepMetrics& metrics); // to all sinks, and the progress line to stdout
  // A line in metrics.jsonl and on stdout (resume, save, validation, stop).
  void event(const string& name, const string& text);
 private:
  struct Sink {
    const char* name;
    optional<OutputFile> file = {}; // none: left out
    void open(const fs::path& at, int64_t resumed_step);
    void append(const string& bytes); // and flushes
    void attempt(const function<void()>& part);
  };
  void print_line(const string& text);

  Sink lines_{"metrics.jsonl"}, events_{"TensorBoard files"};
  bool print_ = true;
  int64_t last_step_;
  deque<double> recent_seconds_; // of the last steps
};

// "step   20/1000  loss 4.1234  grad  1.234  lr 3.00e-04   12.3k tok/s  mfu 31.0 %  mem  94.1 GiB
// left 1h02m"; without an unknown mfu and negative seconds_left.
string progress_line(const StepMetrics& metrics, double seconds_left);

// Three or four significant digits and a unit: "987", "12.3k", "4.56M"; "42s", "1h02m", "3d01h".
string human(double value);
string human_time(double seconds);

// Records of an event file: TFRecord frames (length u64, its masked CRC u32, bytes, their masked
// CRC u32) of an Event (tensorflow/core/util/event.proto). The start makes readers drop what older
// files hold of steps after `resumed_step`.
string tensorboard_start(int64_t resumed_step);
string tensorboard_scalars(int64_t step, const Scalars& values);
// CRC-32C (RFC 3720 appendix B.4), and the form that TFRecord files store.
uint32_t crc32c(string_view bytes);
uint32_t masked_crc32c(string_view bytes);

// Records while it lives, with one of two tools:
//   trace    LibTorch's profiler (Kineto). The destructor writes, in `folder`, trace-rankR.json for
//            chrome://tracing or Perfetto and profile-rankR.txt: per kind and name of kernel time
//            and share; how much of the communication ran behind computing, how much alone, and
//            which stage had started that
//   capture  what nsys (--capture-range=cudaProfilerApi) or ncu record: NVTX ranges
// `memory` (CUDA): also memory-rankR.pickle, every allocation since, for pytorch.org/memory_viz.
struct ProfileOptions {
  fs::path folder;
  int64_t rank;
  Device device;
  string place; // in the mesh: stands in the name of each range
  bool capture, memory;
};
class Profile {
 public:
  explicit Profile(ProfileOptions options);
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;
 private:
  ProfileOptions options_;
};

// Where a Profile lives, a range in traces and NVTX of what this thread starts while it lives.
class StageRange {
 public:
  StageRange(const char* stage, int64_t layer);
  ~StageRange();
  StageRange(const StageRange&) = delete;
  StageRange& operator=(const StageRange&) = delete;
 private:
  string name_;
  optional<at::RecordFunction> record_;
};

// Ctrl-C, SIGTERM and SIGUSR1 (from `pithtrain launch` and batch systems; silent): the first sets
// the flag and prints a line on stderr; a second one that is not SIGUSR1 exits with status 130,
// unless it comes within 0.1 s, as some launchers deliver one twice. Ignores SIGPIPE: a run
// outlives the reader of its output.
void install_signal_handlers();
bool stop_requested();
}
