// What a run tells: a progress line, metrics.jsonl, TensorBoard event files.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pith {

struct StepMetrics {
  int64_t step = 0, total_steps = 0;
  double loss = 0;          // mean over the global batch's trained tokens, without balance loss
  double balance_loss = 0;  // mean over MoE layers, without its coefficient; 1 = balanced
  double grad_norm = 0;     // before clipping
  double lr = 0;
  int64_t tokens = 0;  // input tokens of this step
  int64_t trained_tokens = 0;
  int64_t tokens_seen = 0;  // since the start of the run
  double seconds = 0;       // of this step
  double mfu = 0;           // 0 .. 1; 0 = peak not known
  double memory_gib = 0, memory_peak_gib = 0;
  std::vector<std::pair<std::string, double>> extra;  // "validation/loss", ...
};

// Logging never stops training: a sink that can't be written is reported once and left out.
//
// metrics.jsonl holds one JSON object a line, flushed at once. A step has the fields of
// StepMetrics, "time" (Unix seconds), "tokens_per_second" and the extra values under their names;
// "mfu" is null where the peak is not known. NaN and infinities, which JSON lacks, are null too and
// stand in "nonfinite": {"loss": "nan"}. An event has "event", "time", "after_step" and "text".
class MetricsLog {
 public:
  // Opens run_folder/metrics.jsonl for appending and run_folder/tensorboard/. Of an older file all
  // is cut away from the first line of a step after `resumed_step` (work of a run that was killed),
  // and a half-written last line, so that each step stands once.
  MetricsLog(std::filesystem::path run_folder, int64_t resumed_step, bool tensorboard);
  ~MetricsLog();
  // Writes all sinks and prints the progress line to stdout.
  void write(const StepMetrics& metrics);
  // An event line in metrics.jsonl and a line on stdout (resume, save, validation, stop).
  void event(const std::string& name, const std::string& text);

 private:
  struct Sinks;
  std::unique_ptr<Sinks> sinks_;
};

// "step   20/1000  loss 4.1234  grad  1.234  lr 3.00e-04   12.3k tok/s  mfu 31.0 %  mem  94.1 GiB
// left 1h02m", in one line; mem is the peak. What is not known (mfu, negative seconds_left) is left
// out.
std::string progress_line(const StepMetrics& metrics, double seconds_left);

}  // namespace pith
