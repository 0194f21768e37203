// The optimizer over shard groups: gradient norm, clipping, AdamW, Muon, learning rate.
#pragma once
#include "core/mesh.h"
#include "engine/config.h"
#include "engine/sharding.h"

namespace pith {
inline void zero_grads(span<ShardGroup> groups) {
  for (ShardGroup& group: groups) group.zero_grad();
}

// finish_step(), and the Euclidean norm of all gradients, each parameter counted once -> scalar
// float64 on the device, the same on every rank. Collective.
Tensor grad_norm(span<ShardGroup> groups, const Mesh& mesh);

using Units = vector<vector<Parameter*>>; // of a model's parameter_units()

// Sets the rules of all tensors by training.optimizer and training.groups, before shard groups are
// made. Muon takes matrices and experts; other tensors of two dimensions where a group says so.
// `whole_model` may be `units`: an Error lists patterns that match nothing there, and what Muon
// can't take. -> "muon, rate x 1, decay 0.1: 84 tensors, 1.23M parameters" for each rule.
vector<string> set_update_rules(
  const Units& units, const Units& whole_model, const RunConfig::Training& training);
inline OptimizerStates optimizer_states(const RunConfig::Training& training) {
  return {.bf16_moments = training.moments == "bfloat16", .ema = training.ema_decay > 0};
}

// The matrices that Muon makes orthogonal in a tensor: one an expert, gate and up apart; views
// (n, m), n <= m.
vector<Tensor> muon_matrices(const Tensor& tensor, Fused fused);

// Update `step` (1 = the first; skipped ones do not count) with rate `lr`. Gradients are scaled by
// min(1, clip_norm / norm) unless clip_norm is 0; weight decay is decoupled, on matrices, experts
// and embeddings (weight_decay) and on norms, biases and the router (weight_decay_other). Muon's
// update is scaled by 0.2 sqrt(the larger side), so that AdamW's rate and decay suit it; its ranks
// gather the momentum in the compute dtype and share the matrices out. Updates masters, moments,
// averages and weights; leaves the gradients. Collective.
void optimizer_step(span<ShardGroup> groups, const RunConfig::Training& training, double lr,
  int64_t step, const Tensor& norm);

// Rate of update `step`, without state, so that resuming cannot shift it (1 = the first,
// training.steps = the last; later ones stay at the floor).
//   warm-up   lr * step / warmup_steps, up to and including step warmup_steps; then
//   constant  lr
//   cosine    half a cosine from lr (end of warm-up) to min_lr_ratio * lr (last step);
//             Loshchilov and Hutter 2017, arXiv 1608.03983
//   wsd       lr, then over the last decay_steps steps to min_lr_ratio * lr, linear (Hu et al.
//             2024, arXiv 2404.06395) or by 1 - sqrt (Haegele et al. 2024, arXiv 2405.18392)
double learning_rate(const RunConfig::Training& training, int64_t step);

// The keys that the rate depends on, with their values: "training.lr" -> "0.0003", ...
map<string, string> schedule_settings(const RunConfig::Training& training);
}
