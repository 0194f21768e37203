// The optimizer over shard groups: gradient norm, clipping, AdamW, learning rate.
#pragma once
#include "core/mesh.h"
#include "engine/config.h"
#include "engine/sharding.h"

namespace pith {

inline void zero_grads(std::span<ShardGroup> groups) {
  for (ShardGroup& group : groups) group.zero_grad();
}

// finish_step(), and the Euclidean norm of all gradients of the job, each parameter counted once ->
// scalar float64 on the device, the same on every rank. Collective.
Tensor grad_norm(std::span<ShardGroup> groups, const Mesh& mesh);

// Update `step` (1 = the first) with rate `lr`. Gradients are scaled by min(1, clip_norm / norm)
// unless clip_norm is 0; weight decay is decoupled, on matrices, experts and embeddings
// (weight_decay) and on norms, biases and the router (weight_decay_other). Updates masters, moments
// and weights (this rank's parts, then shared); leaves the gradients. Collective.
void optimizer_step(std::span<ShardGroup> groups, const RunConfig::Training& training, double lr,
    int64_t step, const Tensor& norm);

// Rate of update `step`, a closed form without state, so that resuming cannot shift it (1 = the
// first, training.steps = the last; later steps stay at the floor).
//   warm-up   lr * step / warmup_steps, up to and including step warmup_steps; then
//   constant  lr
//   cosine    half a cosine from lr (end of warm-up) to min_lr_ratio * lr (last step);
//             Loshchilov and Hutter 2017, arXiv 1608.03983
//   wsd       lr, then linear over the last decay_steps steps to min_lr_ratio * lr;
//             Hu et al. 2024, arXiv 2404.06395
double learning_rate(const RunConfig::Training& training, int64_t step);

// The keys that the rate depends on, with their values: "training.lr" -> "0.0003", ...
std::map<std::string, std::string> schedule_settings(const RunConfig::Training& training);

}  // namespace pith
