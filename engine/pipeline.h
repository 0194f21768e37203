// Runs micro-batches through a model in five-stage layers, over pipeline stages, with the forward
// of one micro-batch against the backward of another.
#pragma once
#include "engine/objectives.h"
#include "engine/schedule.h"
#include "engine/sharding.h"
#include "models/model.h"

namespace pith {
// Sums over one call's micro-batches, this rank's tokens and layers; left on the device. Losses and
// reports are on stages that compute the head, of their tokens.
struct BatchResult {
  Tensor loss_sum; // scalar float32, of token losses, or undefined
  Tensor balance_sum; // scalar float32, over rows and MoE layers, or undefined
  Tensor z_sum; // the same of logsumexp(router logits)^2 over tokens, where trained
  Tensor expert_counts; // (all layers, E) int64: this rank's choices
  int64_t num_moe_layers = 0;
  vector<Tensor> per_token; // the objective's, by micro-batch
};

// Sees stage outputs by name, "model.layers.3.attend.rows": for traces, to find a NaN.
using StageObserver = function<void(const string& name, const Tensor& tensor)>;

// Layers of each of 2 * PP chunks, balanced by cost; on one stage without expert parallelism all in
// the first: there is nothing to overlap with.
template <class Config> vector<int64_t> default_chunks(
  const Config& config, const MeshShape& shape, int64_t sequence_length) {
  const int64_t layers = config.num_layers;
  if (shape.pp == 1 && shape.ep == 1) return {layers, 0};
  const double head = 6.0 * real(config.vocab_size * config.hidden_size);
  const double layer = (config.size(sequence_length).flops_per_token - head) / real(layers);
  constexpr double kHeadSpeed = 1.25; // of its products over a layer's, measured on H200
  return balance_chunks(shape.pp, layers, {3 * head / layer / kHeadSpeed, shape.head_share});
}
// What `place` holds of a model cut so. A tied head is not shared by two stages.
ModelPart model_part(const vector<int64_t>& chunks, const MeshShape& shape, const MeshPlace& place,
  const ModelConfig& config);

template <DecoderModel Model> class Pipeline {
 public:
  // `positions`: rotary rows, at least the longest document. `chunks`: the model part's; empty:
  // all. `shards`: where the model is cut. `recompute`: keep only layers' inputs, compute the rest
  // again by the same routes in the backward pass (Chen et al. 2016, arXiv 1604.06174).
  Pipeline(Model& model, const Mesh& mesh, int64_t positions, RouterTraining router,
    vector<int64_t> chunks = {}, const ModelShards* shards = nullptr, bool recompute = false);

  // Adds the gradients of the mean loss over the global batch (and of balance losses) to every
  // Parameter::grad. `tapes`: one a micro-batch to record or replay routes, or empty. Collective
  // over the mesh; every stage gets the same batches.
  template <class Objective> BatchResult forward_backward(
    span<const MicroBatch> batches, const Objective& objective, span<RoutingTape> tapes = {});

  // Without gradients. `caches`: one a layer while generating (one process), or empty.
  template <class Objective> BatchResult forward_only(span<const MicroBatch> batches,
    const Objective& objective, span<LayerCache> caches = {}, span<RoutingTape> tapes = {});

  void observe(StageObserver observer);
  RouterState& router_state(); // first the configuration's bias; each forward reads it
 private:
  struct Impl;
  shared_ptr<Impl> impl_;
};
}
