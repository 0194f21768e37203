#include "engine/optimizer.h"
#include "engine/metrics.h"
#include "operators/adamw.h"
#include "operators/muon.h"

namespace pith {
namespace {
constexpr int64_t kBatchElements = int64_t{1} << 27; // of matrices of one size, on a GPU

double decay_of(const UpdateRule& rule, const RunConfig::Training& training) {
  if (rule.weight_decay >= 0) return rule.weight_decay;
  return rule.decays ? training.weight_decay : training.weight_decay_other;
}

// The directions of Muon's matrices of a group, on their way to every rank of its shard group.
struct Directions {
  Tensor whole = {}, part = {}; // undefined where it has none
  vector<Tensor> matrices = {}; // views of `whole`
  Work gather = {};
};

Directions gather_directions(
  ShardGroup& group, const RunConfig::Training& training, const Tensor& scale) {
  vector<pair<size_t, const HfTensor*>> tensors;
  for (size_t i = 0; i < group.parameters().size(); ++i)
    for (const HfTensor& tensor: group.parameters()[i]->tensors)
      if (tensor.rule.muon) tensors.emplace_back(i, &tensor);
  if (tensors.empty()) return {};
  Directions out{
    at::empty(group.values.sizes(), group.values.options()), at::zeros_like(group.value_part)};
  for (const auto& [i, tensor]: tensors)
    ranges::move(
      muon_matrices(Parameter::view_of(group.slice(out.whole, i), *tensor), tensor->fused),
      std::back_inserter(out.matrices));
  for (const auto& [rule, begin, end, second]: group.segments()) {
    if (!rule.muon) continue;
    Tensor momentum = group.exp_avg.slice(0, begin, end);
    muon_momentum(momentum, group.grad_part.slice(0, begin, end), scale, training.muon_momentum,
      out.part.slice(0, begin, end));
  }
  out.gather = group.shard().all_gather_async(out.whole, out.part);
  return out;
}

// What Muon subtracts, in the layout of the part. Collective.
Tensor muon_updates(const ShardGroup& group, Directions& directions) {
  auto& [whole, part, matrices, gather] = directions;
  map<pair<int64_t, int64_t>, vector<Tensor>> alike; // this rank's, by size
  vector<int64_t> work(index(group.shard().size())); // each goes to the least busy rank
  for (const Tensor& matrix: matrices) {
    const int64_t n = matrix.size(0), m = matrix.size(1);
    const auto least = ranges::min_element(work);
    *least += n * n * (2 * m + n);
    if (least - work.begin() == group.shard().rank()) alike[{n, m}].push_back(matrix);
  }
  gather.wait();
  vector<pair<Tensor, Tensor>> made;
  for (const auto& [size, same]: alike) {
    // One at a time on a CPU, so that the bits do not depend on the others.
    const int64_t most = whole.is_cuda() ? kBatchElements / (size.first * size.second) : 1;
    for (auto next = same.begin(); next != same.end();) {
      const auto end = next + min(max<int64_t>(most, 1), same.end() - next);
      const Tensor result =
        newton_schulz(at::stack({&*next, index(end - next)}), 0.2 * sqrt(real(size.second)));
      for (int64_t i = 0; next != end; ++i) made.emplace_back(*next++, result[i]);
    }
  }
  if (matrices.empty()) return {};
  whole.zero_(); // the sum of one number and zeros is exact
  for (auto& [matrix, result]: made) matrix.copy_(result);
  group.shard().reduce_scatter_async(part, whole).wait();
  return part;
}
}

vector<string> set_update_rules(
  const Units& units, const Units& whole_model, const RunConfig::Training& training) {
  vector<regex> patterns;
  for (const TensorGroup& group: training.groups) patterns.push_back(name_pattern(group.pattern));
  vector<bool> used(patterns.size());
  map<string, pair<int64_t, int64_t>> rules; // tensors, elements
  const auto set = [&](const Parameter& parameter, HfTensor& tensor) {
    UpdateRule& rule = tensor.rule;
    const bool matrix = rule.decays && parameter.group != ParameterGroup::embedding;
    const bool by_default = matrix && training.optimizer == "muon";
    rule = {.muon = by_default, .decays = rule.decays};
    for (size_t i = 0; i < patterns.size(); ++i) {
      if (!std::regex_search(tensor.name, patterns[i])) continue;
      const auto& [pattern, optimizer, lr_scale, decay] = training.groups[i];
      rule = {optimizer.empty() ? by_default : optimizer == "muon", rule.decays, lr_scale, decay};
      used[i] = true;
    }
    const bool plain = parameter.group != ParameterGroup::expert && tensor.shape.size() == 2;
    PITH_CHECK(!rule.muon || matrix || plain,
      "training.groups: Muon takes matrices, {} has the shape ({})", tensor.name,
      fmt::join(tensor.shape, ", "));
    auto& [count, elements] = rules[fmt::format("{}, rate x {}, decay {}",
      rule.muon ? "muon" : "adamw", rule.lr_scale, decay_of(rule, training))];
    ++count, elements += tensor.numel();
  };
  const auto set_all = [&](const Units& model) {
    for (const auto& unit: model)
      for (Parameter* parameter: unit)
        for (HfTensor& tensor: parameter->tensors) set(*parameter, tensor);
  };
  set_all(whole_model);
  for (size_t i = 0; i < used.size(); ++i)
    PITH_CHECK(used[i],
      "training.groups: no tensor of the model matches \"{}\"; the first one is called {}",
      training.groups[i].pattern, whole_model.at(0).at(0)->tensors.at(0).name);
  vector<string> lines;
  for (const auto& [rule, size]: rules)
    lines.push_back(
      fmt::format("{}: {} tensors, {} parameters", rule, size.first, human(real(size.second))));
  if (&units != &whole_model) set_all(units);
  return lines;
}

vector<Tensor> muon_matrices(const Tensor& tensor, Fused fused) {
  const int64_t rows = tensor.size(-2), columns = tensor.size(-1);
  const Tensor parts = fused == Fused::rows ? tensor.view({-1, 2, rows / 2, columns})
    : fused == Fused::columns ? tensor.view({-1, rows, columns / 2, 2}).permute({0, 3, 1, 2})
                              : tensor.view({-1, 1, rows, columns});
  vector<Tensor> matrices;
  for (const Tensor& expert: parts.unbind())
    for (const Tensor& part: expert.unbind())
      matrices.push_back(part.size(0) > part.size(1) ? part.t() : part);
  return matrices;
}

Tensor grad_norm(span<ShardGroup> groups, const Mesh& mesh) {
  vector<Tensor> squares;
  finish_step(groups, [&](const ShardGroup& group) {
    squares.push_back(sum_of_squares(group.grad_part));
    if (const int64_t replicas = group.replicate().size(); replicas > 1)
      squares.back().div_(real(replicas));
  });
  if (squares.empty()) squares.push_back(at::zeros({}, at::dtype(kDouble).device(mesh.device)));
  Tensor total = at::stack(squares).sum();
  mesh.world.all_reduce(total);
  return total.sqrt();
}

void optimizer_step(span<ShardGroup> groups, const RunConfig::Training& training, double lr,
  int64_t step, const Tensor& norm) {
  // The same factor as torch.nn.utils.clip_grad_norm_, computed on the device.
  const Tensor scale = training.clip_norm > 0
    ? (training.clip_norm / (norm + 1e-6)).clamp_max(1.0).to(kFloat)
    : at::ones({}, norm.options().dtype(kFloat));
  const NoGradGuard no_grad;
  const auto directions_of = [&](size_t i) {
    return i < groups.size() ? gather_directions(groups[i], training, scale) : Directions();
  };
  Directions next = directions_of(0);
  for (size_t i = 0; i < groups.size(); ++i) {
    ShardGroup& group = groups[i];
    Directions directions = exchange(next, directions_of(i + 1)); // gathered meanwhile
    const Tensor updates = muon_updates(group, directions);
    for (const auto& [rule, begin, end, second]: group.segments()) {
      const auto part = [&](const Tensor& buffer) { return buffer.slice(0, begin, end); };
      const double rate = lr * rule.lr_scale, decay = decay_of(rule, training);
      Tensor master = part(group.master), value = part(group.value_part);
      if (rule.muon) {
        muon_update(master, part(updates), value, rate, decay);
        continue;
      }
      Tensor exp_avg = part(group.exp_avg);
      Tensor exp_avg_sq = group.exp_avg_sq.narrow(0, second, end - begin);
      adamw_update(master, exp_avg, exp_avg_sq, part(group.grad_part), value, scale,
        {rate, training.beta1, training.beta2, training.epsilon, decay, step});
    }
    if (group.ema.defined())
      group.ema.mul_(training.ema_decay).add_(group.master * (1 - training.ema_decay));
    group.share_values(); // on its way until the next use
  }
}

double learning_rate(const RunConfig::Training& training, int64_t step) {
  PITH_CHECK(step >= 1, "learning rate of step {}: steps count from 1", step);
  const auto& t = training;
  if (step <= t.warmup_steps) return t.lr * real(step) / real(t.warmup_steps);
  if (t.schedule == "constant") return t.lr;
  const bool wsd = t.schedule == "wsd";
  const int64_t decay_begin = wsd ? t.steps - t.decay_steps : t.warmup_steps;
  if (step <= decay_begin) return t.lr;
  const double floor = t.min_lr_ratio * t.lr;
  if (step >= t.steps) return floor;
  const double progress = real(step - decay_begin) / real(t.steps - decay_begin);
  const double gone = t.decay_shape == "linear" ? progress : sqrt(progress); // wsd
  const double share = wsd ? 1 - gone : 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return floor + (t.lr - floor) * share;
}

map<string, string> schedule_settings(const RunConfig::Training& t) {
  map<string, string> settings;
  const auto add = [&](const char* key, const auto& value) {
    settings[fmt::format("training.{}", key)] = fmt::format("{}", value);
  };
  add("lr", t.lr), add("schedule", t.schedule), add("warmup_steps", t.warmup_steps);
  if (t.schedule == "constant") return settings;
  add("steps", t.steps), add("min_lr_ratio", t.min_lr_ratio);
  if (t.schedule == "wsd") add("decay_steps", t.decay_steps), add("decay_shape", t.decay_shape);
  return settings;
}
}
