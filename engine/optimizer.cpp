#include "engine/optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include "operators/adamw.h"

namespace pith {

void zero_grads(std::span<ShardGroup> groups) {
  for (ShardGroup& group : groups) group.grads.zero_();
}

Tensor grad_norm(std::span<ShardGroup> groups, const Mesh& mesh) {
  std::vector<Tensor> squares;
  for (const ShardGroup& group : groups) squares.push_back(sum_of_squares(group.grads));
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
    for (const ShardGroup::Segment& segment : group.segments()) {
      const int64_t count = segment.end - segment.begin;
      Tensor master = group.master.narrow(0, segment.begin, count);
      Tensor exp_avg = group.exp_avg.narrow(0, segment.begin, count);
      Tensor exp_avg_sq = group.exp_avg_sq.narrow(0, segment.begin, count);
      Tensor value = group.values.narrow(0, segment.begin, count);
      const double decay = segment.decays ? training.weight_decay : training.weight_decay_other;
      adamw_update(master, exp_avg, exp_avg_sq, group.grads.narrow(0, segment.begin, count), value,
                   scale, {lr, training.beta1, training.beta2, training.epsilon, decay, step});
    }
    for (Parameter* parameter : group.parameters()) ++parameter->version;
  }
}

}  // namespace pith
