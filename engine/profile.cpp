#include "engine/metrics.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include "core/device.h"

namespace pith {
namespace {

namespace profiler = torch::autograd::profiler;
namespace settings = torch::profiler::impl;

using Spans = std::vector<std::pair<uint64_t, uint64_t>>;  // begin and end in nanoseconds

// Milliseconds that they cover together.
double milliseconds(Spans spans) {
  std::ranges::sort(spans);
  uint64_t sum = 0, covered = 0;
  for (const auto& [begin, end] : spans) {
    sum += std::max(end, covered) - std::max(begin, covered);
    covered = std::max(end, covered);
  }
  return real(sum) * 1e-6;
}

// What a trace says in words. On a CPU the operators take the kernels' place.
std::string summary(const std::vector<profiler::KinetoEvent>& events, at::Device device) {
  Spans computing, communicating, both;
  uint64_t first = UINT64_MAX, last = 0;
  std::map<std::string, std::pair<double, int64_t>> by_name;  // ms, calls
  for (const auto& event : events) {
    if (event.deviceType() != device.type() || event.durationNs() == 0) continue;
    const std::string name = event.name();
    const bool communicates = name.starts_with("nccl");
    const std::pair span(event.startNs(), event.endNs());
    (communicates ? communicating : computing).push_back(span);
    both.push_back(span);
    first = std::min(first, span.first), last = std::max(last, span.second);
    auto& [ms, calls] = by_name[name];
    ms += real(event.durationNs()) * 1e-6;
    ++calls;
  }
  if (both.empty()) return "nothing was recorded\n";
  const double busy = milliseconds(both), work = milliseconds(computing);
  const double talk = milliseconds(communicating), alone = busy - work;
  const double span = milliseconds({{first, last}});
  std::string text = fmt::format(
      "{:.2f} ms: computing {:.2f}, communication {:.2f} ({:.1f} % behind computing, {:.2f} ms "
      "alone), idle {:.2f}\n\n      ms      %   calls  name\n",
      span, work, talk, talk > 0 ? 100 * (1 - alone / talk) : 0.0, alone, span - busy);
  std::vector<std::pair<double, std::string>> order;
  for (const auto& [name, total] : by_name) order.emplace_back(-total.first, name);
  std::ranges::sort(order);
  for (const auto& [ms, name] : order)
    text += fmt::format(
        "{:8.2f} {:6.2f} {:7}  {:.140}\n", -ms, -100 * ms / span, by_name[name].second, name);
  return text;
}

}  // namespace

Profile::Profile(fs::path folder, int64_t rank, at::Device device)
    : folder_(std::move(folder)), rank_(rank), device_(device) {
  synchronize(device_);
  const settings::ProfilerConfig config(settings::ProfilerState::KINETO);
  std::set<settings::ActivityType> kinds{settings::ActivityType::CPU};
  if (device.is_cuda()) kinds.insert(settings::ActivityType::CUDA);
  profiler::prepareProfiler(config, kinds);
  profiler::enableProfiler(config, kinds);
}

Profile::~Profile() {
  try {
    synchronize(device_);
    const auto result = profiler::disableProfiler();
    result->save((folder_ / fmt::format("trace-rank{}.json", rank_)).string());
    write_file(
        folder_, fmt::format("profile-rank{}.txt", rank_), summary(result->events(), device_));
  } catch (const std::exception& error) {
    fmt::print(stderr, "no profile of rank {}: {}\n", rank_, error.what());
  }
}

}  // namespace pith
