// The optimizer over shard groups: gradient norm, clipping, AdamW.
#pragma once
#include <span>

#include "core/mesh.h"
#include "engine/config.h"
#include "engine/sharding.h"

namespace pith {

void zero_grads(std::span<ShardGroup> groups);

// Euclidean norm of all gradients of the job, each parameter counted once, after finish_step() ->
// scalar float64 on the device, the same on every rank. Collective.
Tensor grad_norm(std::span<ShardGroup> groups, const Mesh& mesh);

// Update `step` (1 = the first) with rate `lr`. Gradients are scaled by min(1, clip_norm / norm)
// unless clip_norm is 0; weight decay is decoupled, on matrices, experts and embeddings
// (weight_decay) and on norms, biases and the router (weight_decay_other). Updates masters, moments
// and weights (this rank's parts, then shared); leaves the gradients. Collective.
void optimizer_step(std::span<ShardGroup> groups, const RunConfig::Training& training, double lr,
    int64_t step, const Tensor& norm);

}  // namespace pith
