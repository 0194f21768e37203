#include "engine/sharding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "core/random.h"

namespace pith {
namespace {

constexpr int64_t kAlignment = 64;  // elements: rows of BF16 matrices start on 128-byte borders

bool decays(const Parameter& parameter) {
  return parameter.group == ParameterGroup::matrix || parameter.group == ParameterGroup::expert ||
         parameter.group == ParameterGroup::embedding;
}

}  // namespace

ShardGroup::ShardGroup(std::vector<Parameter*> parameters, at::ScalarType dtype, at::Device device,
                       Use use)
    : parameters_(std::move(parameters)) {
  std::stable_sort(parameters_.begin(), parameters_.end(),
                   [](const Parameter* a, const Parameter* b) { return decays(*a) > decays(*b); });
  int64_t total = 0;
  for (const Parameter* parameter : parameters_) {
    const int64_t end = total + (parameter->numel() + kAlignment - 1) / kAlignment * kAlignment;
    if (segments_.empty() || segments_.back().decays != decays(*parameter))
      segments_.push_back({decays(*parameter), total, end});
    segments_.back().end = end;
    offsets_.push_back(total);
    total = end;
  }
  values = at::zeros({total}, at::TensorOptions(device).dtype(dtype));
  if (use == Use::training) {
    const auto options = at::TensorOptions(device).dtype(grad_dtype(dtype));
    grads = at::zeros({total}, options);
    master = at::zeros({total}, options);
    exp_avg = at::zeros({total}, options);
    exp_avg_sq = at::zeros({total}, options);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = *parameters_[i];
    parameter.value = slice(values, i).view(parameter.shape).detach();
    if (use == Use::training) {
      parameter.value.set_requires_grad(true);
      parameter.grad = slice(grads, i).view(parameter.shape);
    }
  }
}

Tensor ShardGroup::slice(const Tensor& buffer, size_t i) const {
  return buffer.narrow(0, offsets_[i], parameters_[i]->numel());
}

void ShardGroup::initialize(uint64_t seed, double init_std, int64_t num_layers) {
  const double output_std = init_std / std::sqrt(2.0 * static_cast<double>(num_layers));
  const std::vector<Tensor> targets = import_targets();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = *parameters_[i];
    for (const HfTensor& tensor : parameter.tensors) {
      Tensor target = targets[i].narrow(0, tensor.offset, tensor.numel());
      switch (parameter.init) {
        case Init::normal:
          fill_normal(target, seed, tensor.name, init_std);
          break;
        case Init::output_normal:
          fill_normal(target, seed, tensor.name, output_std);
          break;
        case Init::ones:
          target.fill_(1);
          break;
        case Init::zeros:
          target.zero_();
          break;
      }
    }
  }
  publish();
}

std::vector<Tensor> ShardGroup::import_targets() {
  std::vector<Tensor> targets;
  for (size_t i = 0; i < parameters_.size(); ++i)
    targets.push_back(slice(master.defined() ? master : values, i));
  return targets;
}

void ShardGroup::publish() {
  if (master.defined()) values.copy_(master);
  for (Parameter* parameter : parameters_) ++parameter->version;
}

std::vector<ShardGroup> make_shard_groups(const std::vector<std::vector<Parameter*>>& units,
                                          at::ScalarType dtype, at::Device device,
                                          ShardGroup::Use use) {
  std::vector<ShardGroup> groups;
  for (const auto& unit : units) groups.emplace_back(unit, dtype, device, use);
  return groups;
}

std::vector<Parameter*> all_parameters(std::span<ShardGroup> groups) {
  std::vector<Parameter*> all;
  for (const ShardGroup& group : groups)
    all.insert(all.end(), group.parameters().begin(), group.parameters().end());
  return all;
}

}  // namespace pith
