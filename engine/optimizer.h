// The optimizer over shard groups: gradient norm, clipping, AdamW.
#pragma once
#include <span>

#include "core/mesh.h"
#include "engine/config.h"
#include "engine/sharding.h"

namespace pith {

void zero_grads(std::span<ShardGroup> groups);

// Euclidean norm of all gradients, each parameter counted once -> scalar float64 on the device.
Tensor grad_norm(std::span<ShardGroup> groups, const Mesh& mesh);

// Update `step` (1 = the first) with rate `lr`. Gradients are scaled by min(1, clip_norm / norm)
// unless clip_norm is 0; weight decay is decoupled, on matrices, experts and embeddings
// (weight_decay) and on norms, biases and the router (weight_decay_other). Updates masters, moments
// and weights; leaves the gradients.
void optimizer_step(std::span<ShardGroup> groups, const RunConfig::Training& training, double lr,
                    int64_t step, const Tensor& norm);

}  // namespace pith
