#include "engine/metrics.h"
#include <ATen/ops/xlogy.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

namespace pith {
namespace {
using Json = nlohmann::ordered_json;

double unix_seconds() {
  const auto now = chrono::system_clock::now().time_since_epoch();
  return std::round(1e3 * chrono::duration<double>(now).count()) / 1e3;
}

double tokens_per_second(const StepMetrics& m) {
  return m.seconds > 0 ? real(m.tokens) / m.seconds : 0;
}

// The extra values are not among them.
Scalars scalars_of(const StepMetrics& m) {
  return {{"loss", m.loss}, {"balance_loss", m.balance_loss}, {"grad_norm", m.grad_norm},
    {"lr", m.lr}, {"seconds", m.seconds}, {"tokens_per_second", tokens_per_second(m)},
    {"memory_peak_gib", m.memory_peak_gib}};
}

Json expert_load(const Tensor& counts, bool all) {
  Json load;
  const auto list = [](const Tensor& x) {
    const Tensor wide = x.to(kDouble).contiguous();
    return vector<double>(
      wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel());
  };
  const Tensor share = counts / counts.sum(1, /*keepdim=*/true).clamp_min(1);
  load["max_over_mean"] = list(share.amax(1) * counts.size(1));
  const double even = std::log(real(max<int64_t>(2, counts.size(1))));
  load["entropy"] = list(at::xlogy(share, share).sum(1) / -even);
  load["dead"] = list(counts.eq(0).sum(1));
  for (int64_t layer = 0; all && layer < counts.size(0); ++layer)
    load["counts"].push_back(list(counts[layer]));
  return load;
}

// Bytes that are no UTF-8 (of a path, say) become U+FFFD: the file stays valid.
string dump(const Json& line) {
  return line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

string step_line(const StepMetrics& m) {
  Json line = {{"step", m.step}, {"total_steps", m.total_steps}, {"tokens", m.tokens},
    {"trained_tokens", m.trained_tokens}, {"tokens_seen", m.tokens_seen}, {"time", unix_seconds()},
    {"mfu", m.mfu > 0 ? Json(m.mfu) : Json()}};
  for (const Scalars& values: {scalars_of(m), m.extra})
    for (const auto& [name, value]: values) {
      line[name] = value; // nlohmann writes null for what is not finite
      if (!isfinite(value)) line["nonfinite"][name] = fmt::format("{}", value);
    }
  if (m.expert_counts.defined()) line["expert_load"] = expert_load(m.expert_counts, m.all_counts);
  return dump(line);
}

// Bytes of an earlier run's metrics.jsonl before the first step after `resumed_step` or half line.
uint64_t kept_bytes(const fs::path& path, int64_t resumed_step) {
  if (!fs::is_regular_file(path)) return 0;
  ifstream file(path, std::ios::binary);
  uint64_t kept = 0;
  for (string text; getline(file, text) && !file.eof(); kept += text.size() + 1) {
    const Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    const Json step = line.is_object() ? line.value("step", Json()) : Json();
    if (step.is_number_integer() && step.get<int64_t>() > resumed_step) break;
  }
  return kept;
}

void warn(const char* sink, const string& cause) {
  fmt::print(stderr, "warning: {}; training goes on without {}\n", cause, sink);
}

// The pieces of protobuf's wire format that an Event needs: a tag, then a varint, 4 or 8 raw bytes,
// or a length and that many bytes.
enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

string varint(uint64_t value) {
  string bytes;
  for (; value >= 128; value >>= 7) bytes += char(value | 128);
  return bytes + char(value);
}
string field(uint32_t number, Wire wire, const string& value) {
  return varint(number << 3 | wire) + (wire == kBytes ? varint(value.size()) : "") + value;
}

string record(int64_t step, const string& content) {
  const string bytes =
    field(1, kFixed64, raw(unix_seconds())) + field(2, kVarint, varint(uint64_t(step))) + content;
  const string length = raw(uint64_t{bytes.size()});
  return length + raw(masked_crc32c(length)) + bytes + raw(masked_crc32c(bytes));
}
}

void MetricsLog::Sink::attempt(const function<void()>& part) {
  const string problem = problem_of(part);
  if (problem.empty()) return;
  warn(name, problem);
  file.reset();
}

void MetricsLog::Sink::open(const fs::path& at, int64_t resumed_step) {
  attempt([&] {
    fs::create_directories(at.parent_path());
    file.emplace(at, kept_bytes(at, resumed_step));
  });
}

void MetricsLog::Sink::append(const string& bytes) {
  if (!file) return;
  attempt([&] {
    file->append(bytes);
    file->flush();
    PITH_CHECK(fs::exists(file->path()), "{} was removed", file->path());
  });
}

void MetricsLog::print_line(const string& text) {
  if (!print_) return;
  print_ = std::fputs((text + "\n").c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
  if (!print_)
    warn("progress lines", fmt::format("stdout cannot be written: {}", std::strerror(errno)));
}

MetricsLog::MetricsLog(const fs::path& run_folder, int64_t resumed_step, bool tensorboard)
    : last_step_(resumed_step) {
  lines_.open(run_folder / "metrics.jsonl", resumed_step);
  if (!tensorboard) return;
  const auto file = fmt::format("events.out.tfevents.{:010.0f}.{}", unix_seconds(), getpid());
  events_.open(run_folder / "tensorboard" / file, resumed_step);
  events_.append(tensorboard_start(resumed_step));
}

void MetricsLog::write(const StepMetrics& m) {
  last_step_ = m.step;
  lines_.append(step_line(m));
  Scalars values = m.extra;
  if (m.mfu > 0) values.emplace_back("train/mfu", m.mfu);
  for (const auto& [name, value]: scalars_of(m)) values.emplace_back("train/" + name, value);
  events_.append(tensorboard_scalars(m.step, values));

  recent_seconds_.push_back(m.seconds);
  if (recent_seconds_.size() > 21) recent_seconds_.pop_front();
  vector<double> sorted(recent_seconds_.begin(), recent_seconds_.end());
  ranges::sort(sorted);
  print_line(progress_line(m, sorted[sorted.size() / 2] * real(m.total_steps - m.step)));
}

void MetricsLog::event(const string& name, const string& text) {
  lines_.append(
    dump({{"event", name}, {"after_step", last_step_}, {"time", unix_seconds()}, {"text", text}}));
  print_line(fmt::format("{}: {}", name, text));
}

string progress_line(const StepMetrics& m, double seconds_left) {
  const string total = fmt::format("{}", m.total_steps);
  string line = fmt::format("step {:>{}}/{}  loss {:>7.4f}  grad {:>6.4g}  lr {:.2e}  {:>5} tok/s",
    m.step, total.size(), total, m.loss, m.grad_norm, m.lr, human(tokens_per_second(m)));
  if (m.mfu > 0) line += fmt::format("  mfu {:4.1f} %", 100 * m.mfu);
  line += fmt::format("  mem {:5.1f} GiB", m.memory_peak_gib);
  if (seconds_left >= 0) line += fmt::format("  left {}", human_time(seconds_left));
  return line;
}

string human(double value) {
  if (!(value >= 999.5)) return fmt::format("{:.0f}", value);
  for (const char* unit: {"k", "M", "G"}) {
    value /= 1000;
    if (value < 999.5)
      return fmt::format("{:.{}f}{}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, unit);
  }
  return fmt::format("{:.0f}T", value / 1000);
}

string human_time(double seconds) {
  const auto s = std::lround(min(seconds, 1e9));
  if (s < 60) return fmt::format("{}s", s);
  if (s < 3600) return fmt::format("{}m{:02}s", s / 60, s % 60);
  if (s < 86400) return fmt::format("{}h{:02}m", s / 3600, s / 60 % 60);
  return fmt::format("{}d{:02}h", s / 86400, s / 3600 % 24);
}

string tensorboard_start(int64_t resumed_step) {
  // Its version; then a session_log with status START: what older files hold from here on is void.
  return record(0, field(3, kBytes, "brain.Event:2")) +
    record(resumed_step + 1, field(7, kBytes, field(1, kVarint, varint(1))));
}

string tensorboard_scalars(int64_t step, const Scalars& values) {
  string summary;
  for (const auto& [tag, value]: values)
    summary += field(1, kBytes, field(1, kBytes, tag) + field(2, kFixed32, raw(float(value))));
  return record(step, field(5, kBytes, summary));
}

uint32_t crc32c(string_view bytes) {
  uint32_t crc = ~0u;
  for (const char byte: bytes) {
    crc ^= uint8_t(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

uint32_t masked_crc32c(string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u; }
}
