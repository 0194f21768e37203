#include "engine/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <optional>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "engine/tensorboard.h"

namespace pith {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

double unix_seconds() {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  const Milliseconds now = std::chrono::system_clock::now().time_since_epoch();
  return std::round(now.count()) / 1000;
}

double tokens_per_second(const StepMetrics& m) {
  return m.seconds > 0 ? static_cast<double>(m.tokens) / m.seconds : 0;
}

using Scalars = std::vector<std::pair<std::string, double>>;

// The extra values are not among them.
Scalars scalars_of(const StepMetrics& m) {
  return {{"loss", m.loss}, {"balance_loss", m.balance_loss}, {"grad_norm", m.grad_norm},
      {"lr", m.lr}, {"seconds", m.seconds}, {"tokens_per_second", tokens_per_second(m)},
      {"memory_gib", m.memory_gib}, {"memory_peak_gib", m.memory_peak_gib}};
}

Json step_json(const StepMetrics& m) {
  Json line = {{"step", m.step}, {"total_steps", m.total_steps}, {"tokens", m.tokens},
      {"trained_tokens", m.trained_tokens}, {"tokens_seen", m.tokens_seen},
      {"time", unix_seconds()}, {"mfu", m.mfu > 0 ? Json(m.mfu) : Json()}};
  for (const Scalars& values : {scalars_of(m), m.extra})
    for (const auto& [name, value] : values) {
      line[name] = value;  // nlohmann writes null for what is not finite
      if (!std::isfinite(value)) line["nonfinite"][name] = fmt::format("{}", value);
    }
  return line;
}

// Cuts a metrics.jsonl of an earlier run as MetricsLog's constructor promises.
void cut_after(const fs::path& path, int64_t resumed_step) {
  if (!fs::is_regular_file(path)) return;
  std::ifstream file(path, std::ios::binary);
  std::string text;
  uint64_t kept = 0;
  bool complete = true;  // the last line kept ends in a newline
  while (std::getline(file, text)) {
    const bool newline = !file.eof();
    const Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (line.is_discarded() && !newline) break;
    const Json step = line.is_object() && line.contains("step") ? line["step"] : Json();
    if (step.is_number_integer() && step.get<int64_t>() > resumed_step) break;
    kept += text.size() + (newline ? 1 : 0);
    complete = newline;
  }
  file.close();
  fs::resize_file(path, kept);
  if (!complete) std::ofstream(path, std::ios::binary | std::ios::app) << '\n';
}

std::string duration_text(double seconds) {
  const auto s = std::lround(std::min(seconds, 1e9));
  if (s < 60) return fmt::format("{}s", s);
  if (s < 3600) return fmt::format("{}m{:02}s", s / 60, s % 60);
  if (s < 86400) return fmt::format("{}h{:02}m", s / 3600, s / 60 % 60);
  return fmt::format("{}d{:02}h", s / 86400, s / 3600 % 24);
}

// Three or four significant digits and a unit: "987", "12.3k", "4.56M".
std::string human(double value) {
  if (!(value >= 999.5)) return fmt::format("{:.0f}", value);
  for (const char* unit : {"k", "M", "G"}) {
    value /= 1000;
    if (value < 9.995) return fmt::format("{:.2f}{}", value, unit);
    if (value < 99.95) return fmt::format("{:.1f}{}", value, unit);
    if (value < 999.5) return fmt::format("{:.0f}{}", value, unit);
  }
  return fmt::format("{:.0f}T", value / 1000);
}

}  // namespace

struct MetricsLog::Sinks {
  fs::path folder;
  std::optional<std::ofstream> lines;
  std::optional<TensorBoardWriter> tensorboard;
  bool print = true;
  int64_t last_step = 0;
  std::deque<double> recent_seconds;  // of the last steps

  // Runs `open`; an exception means that there is no such sink.
  template <class Open>
  void attempt(const char* sink, Open open) {
    try {
      open();
    } catch (const std::exception& error) {
      const auto* known = dynamic_cast<const Error*>(&error);
      report(sink, known ? known->message() : error.what());
    }
  }
  void report(const char* sink, const std::string& cause) {
    fmt::print(stderr, "warning: {}; training goes on without {}\n", cause, sink);
  }
  void report_unwritten(const char* sink, const std::string& what) {
    report(sink, fmt::format("{} cannot be written: {}", what, std::strerror(errno)));
  }
  void write_line(const Json& line) {
    if (!lines) return;
    // Bytes that are no UTF-8 (of a path, say) become U+FFFD: the file stays valid.
    const fs::path path = folder / "metrics.jsonl";
    *lines << line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n" << std::flush;
    // A deleted file still takes what is written, so its name is looked up too.
    if (lines->good() && access(path.c_str(), W_OK) == 0) return;
    report_unwritten("metrics.jsonl", path.string() + ":");
    lines.reset();
  }
  void print_line(const std::string& text) {
    if (!print) return;
    if (std::fputs((text + "\n").c_str(), stdout) >= 0 && std::fflush(stdout) == 0) return;
    print = false;
    report_unwritten("progress lines", "stdout");
  }
  double seconds_left(const StepMetrics& m) {
    recent_seconds.push_back(m.seconds);
    if (recent_seconds.size() > 21) recent_seconds.pop_front();
    std::vector<double> sorted(recent_seconds.begin(), recent_seconds.end());
    const auto middle = sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle * static_cast<double>(m.total_steps - m.step);
  }
};

MetricsLog::MetricsLog(fs::path run_folder, int64_t resumed_step, bool tensorboard)
    : sinks_(std::make_unique<Sinks>()) {
  sinks_->folder = run_folder;
  sinks_->last_step = resumed_step;
  const fs::path path = run_folder / "metrics.jsonl";
  sinks_->attempt("metrics.jsonl", [&] {
    fs::create_directories(run_folder);
    cut_after(path, resumed_step);
    std::ofstream file(path, std::ios::binary | std::ios::app);
    PITH_CHECK(file.good(), "{}: cannot be opened: {}", path.string(), std::strerror(errno));
    sinks_->lines = std::move(file);
  });
  if (!tensorboard) return;
  sinks_->attempt("TensorBoard files",
      [&] { sinks_->tensorboard.emplace(run_folder / "tensorboard", resumed_step); });
}

MetricsLog::~MetricsLog() = default;

void MetricsLog::write(const StepMetrics& m) {
  sinks_->last_step = m.step;
  sinks_->write_line(step_json(m));
  if (sinks_->tensorboard) {
    Scalars values = m.extra;
    if (m.mfu > 0) values.emplace_back("train/mfu", m.mfu);
    for (const auto& [name, value] : scalars_of(m)) values.emplace_back("train/" + name, value);
    if (!sinks_->tensorboard->scalars(m.step, values)) {
      sinks_->report_unwritten("TensorBoard files", (sinks_->folder / "tensorboard:").string());
      sinks_->tensorboard.reset();
    }
  }
  sinks_->print_line(progress_line(m, sinks_->seconds_left(m)));
}

void MetricsLog::event(const std::string& name, const std::string& text) {
  sinks_->write_line(Json{{"event", name}, {"after_step", sinks_->last_step},
      {"time", unix_seconds()}, {"text", text}});
  sinks_->print_line(fmt::format("{}: {}", name, text));
}

std::string progress_line(const StepMetrics& m, double seconds_left) {
  const std::string total = fmt::format("{}", m.total_steps);
  std::string line =
      fmt::format("step {:>{}}/{}  loss {:>7.4f}  grad {:>6.4g}  lr {:.2e}  {:>5} tok/s", m.step,
          total.size(), total, m.loss, m.grad_norm, m.lr, human(tokens_per_second(m)));
  if (m.mfu > 0) line += fmt::format("  mfu {:4.1f} %", 100 * m.mfu);
  line += fmt::format("  mem {:5.1f} GiB", m.memory_peak_gib);
  if (seconds_left >= 0) line += fmt::format("  left {}", duration_text(seconds_left));
  return line;
}

}  // namespace pith
