#include "engine/optimizer.h"

#include <ATen/ops/stack.h>

#include "operators/adamw.h"

namespace pith {

Tensor grad_norm(std::span<ShardGroup> groups, const Mesh& mesh) {
  std::vector<Tensor> squares;
  finish_step(groups, [&](const ShardGroup& group) {
    squares.push_back(sum_of_squares(group.grad_part));
    if (const int64_t replicas = group.replicate().size(); replicas > 1)
      squares.back().div_(static_cast<double>(replicas));
  });
  if (squares.empty()) squares.push_back(at::zeros({}, at::dtype(at::kDouble).device(mesh.device)));
  Tensor total = at::stack(squares).sum();
  mesh.world.all_reduce(total);
  return total.sqrt();
}

void optimizer_step(std::span<ShardGroup> groups, const RunConfig::Training& training, double lr,
    int64_t step, const Tensor& norm) {
  // The same factor as torch.nn.utils.clip_grad_norm_, computed on the device.
  const Tensor scale = training.clip_norm > 0
      ? (training.clip_norm / (norm + 1e-6)).clamp_max(1.0).to(at::kFloat)
      : at::ones({}, norm.options().dtype(at::kFloat));
  for (ShardGroup& group : groups) {
    const int64_t part_begin = group.part_begin();
    for (const ShardGroup::Segment& segment : group.segments()) {
      const int64_t begin = std::max<int64_t>(segment.begin - part_begin, 0);
      const int64_t end = std::min(segment.end - part_begin, group.master.numel());
      if (begin >= end) continue;
      const auto part = [&](const Tensor& buffer) { return buffer.narrow(0, begin, end - begin); };
      Tensor master = part(group.master), value = part(group.value_part);
      Tensor exp_avg = part(group.exp_avg), exp_avg_sq = part(group.exp_avg_sq);
      const double decay = segment.decays ? training.weight_decay : training.weight_decay_other;
      adamw_update(master, exp_avg, exp_avg_sq, part(group.grad_part), value, scale,
          {lr, training.beta1, training.beta2, training.epsilon, decay, step});
    }
    group.share_values();  // on its way until the next use
  }
}

double learning_rate(const RunConfig::Training& training, int64_t step) {
  PITH_CHECK(step >= 1, "learning rate of step {}: steps count from 1", step);
  const auto& t = training;
  if (step <= t.warmup_steps)
    return t.lr * static_cast<double>(step) / static_cast<double>(t.warmup_steps);
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
