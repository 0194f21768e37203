#include "engine/sharding.h"
#include <c10/core/StorageImpl.h>
#include "core/random.h"
#include "models/model.h"

namespace pith {
namespace {
constexpr int64_t kAlignment = 64; // elements: rows of BF16 matrices start on 128-byte borders

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Lets the storage of `shell`, and with it every view of it, point at `memory`, or at nothing:
// reading then crashes at once. The views stay the same tensors: a graph holds the leaves it was
// recorded with, so leaves with memory of their own would keep it until the backward.
void point_at(const Tensor& shell, const Tensor& memory) {
  c10::StorageImpl* storage = shell.storage().unsafeGetStorageImpl();
  void* data = memory.defined() ? memory.data_ptr() : nullptr;
  storage->set_data_ptr_noswap(at::DataPtr(data, shell.device()));
  storage->set_nbytes(memory.defined() ? memory.nbytes() : 0);
}
}

ShardGroup::ShardGroup(vector<Parameter*> parameters, ScalarType dtype, Device device, Use use,
  Comm shard, Comm replicate, ShardMode mode, int64_t unit, OptimizerStates states)
    : parameters_(std::move(parameters)), shard_(std::move(shard)),
      replicate_(std::move(replicate)), mode_(shard_.size() == 1 ? ShardMode::keep : mode),
      unit_(unit), reductions_(make_shared<Reductions>()) {
  ranges::stable_sort(parameters_, std::greater(),
    [](const Parameter* parameter) { return parameter->tensors.front().rule; });
  int64_t total = 0;
  for (const Parameter* parameter: parameters_) {
    offsets_.push_back(total);
    for (const HfTensor& tensor: parameter->tensors) {
      const int64_t at = total + tensor.offset;
      if (!segments_.empty()) segments_.back().end = at;
      if (segments_.empty() || segments_.back().rule != tensor.rule)
        segments_.push_back({tensor.rule, at, at});
    }
    total += round_up(parameter->numel(), kAlignment);
  }
  const bool training = use == Use::training, keep = mode_ == ShardMode::keep;
  total = round_up(total, kAlignment * shard_.size());
  if (!segments_.empty()) segments_.back().end = total;
  const int64_t part = total / shard_.size(), begin = part * shard_.rank();
  int64_t second = 0;
  for (Segment& segment: segments_) {
    segment.begin = std::clamp<int64_t>(segment.begin - begin, 0, part);
    segment.end = std::clamp<int64_t>(segment.end - begin, 0, part);
    segment.second = second;
    if (!segment.rule.muon) second += segment.end - segment.begin;
  }
  std::erase_if(segments_, [](const Segment& segment) { return segment.begin == segment.end; });
  const auto options = TensorOptions(device).dtype(dtype);
  const auto wide = options.dtype(wide_dtype(dtype));
  values = keep ? at::zeros({total}, options) : at::empty({total}, options);
  value_part = keep ? values.narrow(0, begin, part) : at::zeros({part}, options);
  if (training) {
    grads = keep ? at::zeros({total}, wide) : at::empty({total}, wide);
    grad_part = keep ? grads.narrow(0, begin, part) : at::zeros({part}, wide);
    const auto moments = states.bf16_moments ? options.dtype(kBFloat16) : wide;
    master = at::zeros({part}, wide);
    exp_avg = at::zeros({part}, moments);
    exp_avg_sq = at::zeros({second}, moments);
    if (states.ema) ema = at::zeros({part}, wide);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = *parameters_[i];
    parameter.value = slice(values, i).view(parameter.shape).detach();
    if (training) {
      parameter.value.set_requires_grad(true);
      parameter.grad = slice(grads, i).view(parameter.shape);
    }
  }
  if (keep) return;
  point_at(values, {});
  if (training) point_at(grads, {});
}

vector<ShardGroup::Piece> ShardGroup::pieces() const {
  vector<Piece> pieces;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    for (const HfTensor& tensor: parameters_[i]->tensors) {
      const int64_t at = offsets_[i] + tensor.offset - part_begin(); // its start in the part
      const int64_t begin = max<int64_t>(at, 0);
      const int64_t end = min(at + tensor.numel(), value_part.numel());
      if (begin >= end) continue;
      const int64_t first = tensor.first_element() + begin - at;
      pieces.push_back({parameters_[i], &tensor, first, begin, end - begin});
    }
  }
  return pieces;
}

int64_t ShardGroup::second_moment_at(int64_t begin) const {
  const auto segment = ranges::upper_bound(segments_, begin, {}, &Segment::begin) - 1;
  return segment->rule.muon ? -1 : segment->second + begin - segment->begin;
}

void initialize_tensor(Tensor& target, const Parameter& parameter, const HfTensor& tensor,
  int64_t first, uint64_t seed, double init_std, int64_t num_layers) {
  const Init init = parameter.init;
  const bool output = init == Init::output_normal, decay = init == Init::log_decay;
  const double output_std = init_std / sqrt(2.0 * real(num_layers));
  if (output || decay || init == Init::normal)
    fill_normal(target, seed, tensor.name, decay ? 1 : output ? output_std : init_std, first);
  else target.fill_(init == Init::ones ? 1 : 0);
  if (decay) // from normal to uniform by the distribution function
    target.div_(-std::numbers::sqrt2).erfc_().mul_((16 - 0.01) / 2).add_(0.01).log_();
}

void ShardGroup::initialize(uint64_t seed, double init_std, int64_t num_layers) {
  for (const auto& [parameter, tensor, first, begin, count]: pieces()) {
    Tensor target = import_target().narrow(0, begin, count);
    initialize_tensor(target, *parameter, *tensor, first, seed, init_std, num_layers);
  }
  publish();
}

void ShardGroup::publish() {
  if (ema.defined()) ema.copy_(master);
  show(import_target());
}

void ShardGroup::show(const Tensor& part) {
  gather_.wait();
  value_part.copy_(part);
  share_values();
  if (mode_ == ShardMode::keep) gather_.wait();
}

void ShardGroup::share_values() {
  for (Parameter* parameter: parameters_) ++parameter->version;
  if (mode_ == ShardMode::keep) {
    if (shard_.size() > 1) gather_ = shard_.all_gather_async(values, value_part);
    return;
  }
  PITH_CHECK(
    uses_ == 0, "the weights of {} change while they are in use", parameters_.front()->name);
  gathered_.reset();
}

void ShardGroup::prefetch() {
  if (mode_ == ShardMode::keep || gathered_.defined()) return;
  gathered_ = at::empty(values.sizes(), values.options());
  gather_ = shard_.all_gather_async(gathered_, value_part);
}

void ShardGroup::before_forward() {
  if (mode_ == ShardMode::keep) return gather_.wait();
  prefetch();
  if (uses_++ > 0) return;
  gather_.wait();
  point_at(values, gathered_);
}

void ShardGroup::after_forward() {
  if (mode_ == ShardMode::keep) return;
  PITH_CHECK(uses_ > 0, "the weights of {} are not in use", parameters_.front()->name);
  if (--uses_ > 0) return;
  point_at(values, {});
  gathered_.reset();
}

void ShardGroup::before_backward() {
  before_forward();
  if (mode_ == ShardMode::keep || backwards_++ > 0) return;
  opened_ = at::zeros(grads.sizes(), grads.options());
  point_at(grads, opened_);
}

void ShardGroup::after_backward(bool last) {
  if (mode_ == ShardMode::keep) {
    if (last) start_reduction();
    return;
  }
  after_forward();
  if (--backwards_ > 0) return;
  point_at(grads, {});
  Reduction reduction{{}, std::move(opened_), at::empty_like(grad_part), grad_part};
  reduction.work = shard_.reduce_scatter_async(reduction.sum, reduction.whole);
  opened_.reset();
  reductions_->push_back(std::move(reduction));
  for (; reductions_->size() > 2; reductions_->pop_front()) reductions_->front().finish();
}

void ShardGroup::start_reduction() {
  if (mode_ == ShardMode::reshard || exchange(reduced_, true)) return;
  reduction_ = shard_.reduce_scatter_async(grad_part, grads);
}

Work ShardGroup::finish_reduction() {
  gather_.wait(); // of a unit that this step did not use: value_part is about to be written
  reduction_.wait();
  for (; !reductions_->empty(); reductions_->pop_front()) reductions_->front().finish();
  return replicate_.all_reduce_async(grad_part);
}

vector<ShardGroup> make_shard_groups(const vector<vector<Parameter*>>& units, ScalarType dtype,
  const Mesh& mesh, ShardGroup::Use use, ShardMode mode, OptimizerStates states) {
  vector<ShardGroup> groups;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    vector<Parameter*> dense, experts;
    for (Parameter* parameter: units[unit]) {
      const bool cut = parameter->group == ParameterGroup::expert && mesh.expert.size() > 1;
      (cut ? experts : dense).push_back(parameter);
    }
    const auto add = [&](vector<Parameter*>& parameters, const Comm& shard, const Comm& replicate) {
      if (parameters.empty()) return;
      // What two stages share is used at different times: not gathered for each use.
      const bool shared = shard.size() > mesh.dense_shard.size();
      groups.emplace_back(std::move(parameters), dtype, mesh.device, use, shard, replicate,
        shared ? ShardMode::keep : mode, int64_t(units.size() - 1 - unit), states);
      groups.back().reductions_ = groups.front().reductions_;
    };
    add(dense, unit + 1 == units.size() ? mesh.head_shard : mesh.dense_shard, mesh.dense_replicate);
    add(experts, mesh.expert_shard, mesh.expert_replicate);
  }
  return groups;
}

void finish_step(span<ShardGroup> groups, const function<void(const ShardGroup&)>& then) {
  for (ShardGroup& group: groups) group.start_reduction();
  for (ShardGroup& group: std::views::reverse(groups)) { // as the backward pass did
    group.finish_reduction().wait();
    then(group);
  }
}

ModelShards::ModelShards(
  span<ShardGroup> groups, const ModelPart& part, const Parameter* head_weight) {
  if (groups.empty()) return;
  const int64_t last = groups.front().unit();
  vector<UnitShards> units(index(last + 1));
  for (ShardGroup& group: groups) units[index(last - group.unit())].groups.push_back(&group);
  if (part.head) {
    head = std::move(units.back());
    units.pop_back();
    for (ShardGroup& group: groups) {
      if (group.parameters().front() != head_weight || group.unit() < last || last == 0) continue;
      head.groups.push_back(&group);
      head.tied = &group;
    }
  }
  size_t next = units.size() - part.layers.size();
  if (part.embedding) embedding = units.front();
  for (const int64_t layer: part.layers) layers[layer] = std::move(units[next++]);
}

vector<Parameter*> all_parameters(span<ShardGroup> groups) {
  vector<Parameter*> all;
  for (const ShardGroup& group: groups)
    all.insert(all.end(), group.parameters().begin(), group.parameters().end());
  return all;
}
}
