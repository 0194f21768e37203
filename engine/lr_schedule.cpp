#include "engine/lr_schedule.h"

#include <numbers>

#include "core/error.h"

namespace pith {

double learning_rate(const RunConfig::Training& training, int64_t step) {
  PITH_CHECK(step >= 1, "learning rate of step {}: steps count from 1", step);
  const auto& t = training;
  if (step <= t.warmup_steps) {
    return t.lr * static_cast<double>(step) / static_cast<double>(t.warmup_steps);
  }
  if (t.schedule == "constant") return t.lr;
  const bool wsd = t.schedule == "wsd";
  PITH_CHECK(
      wsd || t.schedule == "cosine", "schedule {}: not one of constant, cosine, wsd", t.schedule);
  const int64_t decay_begin = wsd ? t.steps - t.decay_steps : t.warmup_steps;
  if (step <= decay_begin) return t.lr;
  const double floor = t.min_lr_ratio * t.lr;
  if (step >= t.steps) return floor;
  const double progress =
      static_cast<double>(step - decay_begin) / static_cast<double>(t.steps - decay_begin);
  const double share = wsd ? 1 - progress : 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return floor + (t.lr - floor) * share;
}

std::map<std::string, std::string> schedule_settings(const RunConfig::Training& t) {
  std::map<std::string, std::string> settings = {{"training.lr", fmt::format("{}", t.lr)},
      {"training.schedule", t.schedule},
      {"training.warmup_steps", fmt::format("{}", t.warmup_steps)}};
  if (t.schedule == "constant") return settings;
  settings["training.steps"] = fmt::format("{}", t.steps);
  settings["training.min_lr_ratio"] = fmt::format("{}", t.min_lr_ratio);
  if (t.schedule == "wsd") settings["training.decay_steps"] = fmt::format("{}", t.decay_steps);
  return settings;
}

}  // namespace pith
