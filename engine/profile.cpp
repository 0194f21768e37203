#include <dlfcn.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include "engine/metrics.h"

#if PITH_CUDA
#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>
#endif

#include "core/device.h"

namespace pith {
namespace {
namespace profiler = torch::autograd::profiler;
namespace settings = torch::profiler::impl;

using Spans = vector<pair<uint64_t, uint64_t>>; // begin and end in nanoseconds

// The same times in order, none of them twice.
Spans merged(Spans spans) {
  ranges::sort(spans);
  Spans result;
  for (const auto& [begin, end]: spans) {
    if (result.empty() || begin > result.back().second) result.emplace_back(begin, end);
    result.back().second = max(result.back().second, end);
  }
  return result;
}

double milliseconds(const Spans& spans) {
  uint64_t sum = 0;
  for (const auto& [begin, end]: merged(spans)) sum += end - begin;
  return real(sum) * 1e-6;
}

// The part of a span that lies outside of merged ones.
double alone(const pair<uint64_t, uint64_t>& span, const Spans& others) {
  Spans inside;
  for (const auto& [begin, end]: others)
    if (begin < span.second && end > span.first)
      inside.emplace_back(max(begin, span.first), min(end, span.second));
  return milliseconds({span}) - milliseconds(inside);
}

constexpr string_view kStage = "stage "; // names of ranges: "stage dispatch, layer 3 (...)"
optional<string> place_of_ranges; // of the Profile that lives

// What a trace says in words. On a CPU the operators take the kernels' place.
string summary(const vector<profiler::KinetoEvent>& events, Device device) {
  Spans computing, communicating, both;
  uint64_t first = UINT64_MAX, last = 0;
  map<string, pair<double, int64_t>> by_name; // ms, calls
  struct Range {
    string stage;
    int64_t stream;
    pair<uint64_t, uint64_t> span;
  };
  vector<Range> ranges, transfers;
  for (const auto& event: events) {
    if (event.deviceType() != device.type() || event.durationNs() == 0) continue;
    const string name = event.name();
    const bool communicates = name.starts_with("nccl");
    const pair span(event.startNs(), event.endNs());
    const int64_t stream = event.deviceResourceId();
    if (name.starts_with(kStage)) {
      ranges.push_back({name.substr(kStage.size(), name.find(',') - kStage.size()), stream, span});
      continue;
    }
    if (communicates) transfers.push_back({"", stream, span});
    (communicates ? communicating : computing).push_back(span);
    both.push_back(span);
    first = min(first, span.first), last = max(last, span.second);
    auto& [ms, calls] = by_name[name];
    ms += real(event.durationNs()) * 1e-6;
    ++calls;
  }
  if (both.empty()) return "nothing was recorded\n";
  const double busy = milliseconds(both), work = milliseconds(computing);
  const double talk = milliseconds(communicating), exposed = busy - work;
  const double span = milliseconds({{first, last}});
  string text = fmt::format(
    "{:.2f} ms: computing {:.2f}, communication {:.2f} ({:.1f} % behind computing, {:.2f} ms "
    "alone), idle {:.2f}\n",
    span, work, talk, talk > 0 ? 100 * (1 - exposed / talk) : 0.0, exposed, span - busy);
  computing = merged(computing);
  map<string, double> exposed_by_stage;
  for (const Range& transfer: transfers) {
    const auto owner = ranges::find_if(ranges, [&](const Range& range) {
      return range.stream == transfer.stream && range.span.first <= transfer.span.first &&
        transfer.span.second <= range.span.second;
    });
    exposed_by_stage[owner == ranges.end() ? "other" : owner->stage] +=
      alone(transfer.span, computing);
  }
  for (const auto& [stage, ms]: exposed_by_stage)
    text += fmt::format("  alone, started by {}: {:.2f} ms\n", stage, ms);
  text += fmt::format("  peak memory {:.2f} GiB\n", peak_memory_gib(device));
  text += "\n      ms      %   calls  name\n";
  vector<pair<double, string>> order;
  for (const auto& [name, total]: by_name) order.emplace_back(-total.first, name);
  ranges::sort(order);
  for (const auto& [ms, name]: order)
    text += fmt::format(
      "{:8.2f} {:6.2f} {:7}  {:.140}\n", -ms, -100 * ms / span, by_name[name].second, name);
  return text;
}

// Functions of libtorch_cuda, which core/device.cpp loads at run time.
template <class F> F* torch_cuda(const char* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  PITH_CHECK(found, "LibTorch has no {}", name);
  return reinterpret_cast<F*>(found);
}

void record_memory(bool on) { // torch::cuda::_record_memory_history
  torch_cuda<void(bool, bool, int64_t, bool, bool, bool, bool, bool, const vector<string>&)>(
    "_ZN5torch4cuda22_record_memory_historyEbblbbbbbRKSt6vector"
    "INSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS"
    "7_EE")(on, false, 1'000'000, false, false, true, false, false, {});
}
}

Profile::Profile(ProfileOptions options) : options_(std::move(options)) {
  synchronize(options_.device);
  place_of_ranges = options_.place;
  if (options_.memory && options_.device.is_cuda()) record_memory(true);
#if PITH_CUDA
  if (options_.capture && options_.device.is_cuda()) cudaProfilerStart();
#endif
  if (options_.capture) return;
  const settings::ProfilerConfig config(settings::ProfilerState::KINETO);
  set<settings::ActivityType> kinds{settings::ActivityType::CPU};
  if (options_.device.is_cuda()) kinds.insert(settings::ActivityType::CUDA);
  profiler::prepareProfiler(config, kinds);
  profiler::enableProfiler(config, kinds);
}

Profile::~Profile() {
  place_of_ranges.reset();
  const auto name = [&](
                      const char* form) { return fmt::format(fmt::runtime(form), options_.rank); };
  try {
    synchronize(options_.device);
#if PITH_CUDA
    if (options_.capture && options_.device.is_cuda()) cudaProfilerStop();
#endif
    if (options_.memory && options_.device.is_cuda()) {
      write_file(options_.folder, name("memory-rank{}.pickle"),
        torch_cuda<string()>("_ZN5torch4cuda24_memory_snapshot_pickledB5cxx11Ev")());
      record_memory(false);
    }
    if (options_.capture) return;
    const auto result = profiler::disableProfiler();
    result->save((options_.folder / name("trace-rank{}.json")).string());
    write_file(
      options_.folder, name("profile-rank{}.txt"), summary(result->events(), options_.device));
  } catch (const exception& error) {
    fmt::print(stderr, "no profile of rank {}: {}\n", options_.rank, error);
  }
}

StageRange::StageRange(const char* stage, int64_t layer) {
  if (!place_of_ranges) return;
  name_ = fmt::format("{}{}, layer {} ({})", kStage, stage, layer, *place_of_ranges);
  record_.emplace(at::RecordScope::USER_SCOPE);
  record_->before(name_);
#if PITH_CUDA
  nvtxRangePushA(name_.c_str());
#endif
}

StageRange::~StageRange() {
#if PITH_CUDA
  if (record_) nvtxRangePop();
#endif
}
}
