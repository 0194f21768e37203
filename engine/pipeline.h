// Runs micro-batches through a model in five-stage layers: forward, backward, forward only; over
// pipeline stages, with the forward of one micro-batch against the backward of another.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/expert_parallel.h"
#include "engine/objectives.h"
#include "engine/schedule.h"
#include "engine/sharding.h"
#include "engine/stage_links.h"
#include "models/model.h"
#include "operators/matmul.h"

namespace pith {

// Sums over the micro-batches of one call, left on the device: nobody waits. Of this rank's tokens
// and layers; losses and reports are on the first stage, which holds the head.
struct BatchResult {
  Tensor loss_sum;     // scalar float32: sum of token losses, or undefined
  Tensor balance_sum;  // scalar float32: balance loss summed over rows and MoE layers, or undefined
  int64_t num_moe_layers = 0;
  std::vector<Tensor> per_token;  // the objective's report, one tensor a micro-batch
};

// Sees stage outputs by name ("model.layers.3.attend.rows") where a caller asks: traces, the search
// for a NaN.
using StageObserver = std::function<void(const std::string& name, const Tensor& tensor)>;

// Everything one layer of one micro-batch keeps from its forward to its backward pass.
struct LayerRun {
  int64_t layer;
  Tensor hidden;       // (T, H) leaf; where layers are recomputed only this and topk_idx are kept
  Attended attended;   // outputs of stage 1, inside its graph
  Attended joined;     // the same values as leaves of the later stages
  Tensor shared_rows;  // (T, H) leaf of shared()
  ExpertExchange exchange;
  ExpertExchange::Arrived arrived;  // leaves of stage 3
  Tensor expert_out;                // output of stage 3
  Tensor returned, shared_leaf;     // leaves of stage 5
  Tensor shared;                    // output of shared()
  Tensor output;                    // (T, H)
  bool again = false;               // recomputed in the backward pass
};

// One chunk of one micro-batch in flight.
struct ChunkRun {
  const MicroBatch* batch = nullptr;
  std::span<LayerCache> caches;
  RoutingTape* tape = nullptr;
  int chunk = 0;
  int64_t microbatch = 0;
  Tensor embedded;               // (T, H) output of the embedding, inside its graph
  std::vector<LayerRun> layers;  // emptied from the back by the backward pass
  Tensor hidden;                 // (T, H) leaf of the head
  Tensor loss;                   // root of the head
  Tensor handed_over;            // where both chunks meet on the last stage: hidden, then gradient
  std::vector<WeightGradient> deferred;
};

// Layers of each of the model's 2 * PP chunks, balanced by their cost; on one stage without expert
// parallelism all are in the first, since there is nothing to overlap with.
template <class Config>
std::vector<int64_t> default_chunks(
    const Config& config, const MeshShape& shape, int64_t sequence_length) {
  const auto layers = static_cast<int64_t>(config.num_layers);
  if (shape.pp == 1 && shape.ep == 1) return {layers, 0};
  const double head = 6.0 * static_cast<double>(config.vocab_size * config.hidden_size);
  const double all = config.size(sequence_length).flops_per_token;
  const double layer = (all - head) / static_cast<double>(layers);
  constexpr double kHeadSpeed = 1.25;  // of its large products over a layer's, measured on H200
  return balance_chunks(
      shape.pp, std::vector<double>(static_cast<size_t>(layers), 1.0), head / layer / kHeadSpeed);
}
// Layers of a rank's two chunks, and what the process at `place` holds of a model cut so.
std::array<std::vector<int64_t>, 2> layers_of_rank(
    const std::vector<int64_t>& chunks, int64_t ranks, int64_t rank);
ModelPart model_part(const std::vector<int64_t>& chunks, const MeshShape& shape,
    const MeshPlace& place, int64_t num_experts);

template <DecoderModel Model>
class Pipeline {
 public:
  // `positions`: rows of the rotary table, at least the longest document. `chunks`: as the model's
  // part was made from; empty: everything here. `shards`: of the model, where they are cut.
  // `recompute`: keep only the input of each layer and compute the rest again in the backward pass
  // (Chen et al. 2016, arXiv 1604.06174), with the same routes.
  Pipeline(Model& model, const Mesh& mesh, int64_t positions, RouterTraining router,
      std::vector<int64_t> chunks = {}, const ModelShards* shards = nullptr,
      bool recompute = false);

  // Adds the gradients of the mean loss over the global batch (and of the balance losses) to every
  // Parameter::grad. `tapes`: one a micro-batch to record or replay routes, or empty. Collective
  // over the mesh; every stage gets the same batches.
  template <class Objective>
  BatchResult forward_backward(std::span<const MicroBatch> batches, const Objective& objective,
      std::span<RoutingTape> tapes = {});

  // The same without gradients. `caches`: one a layer while generating (one process), or empty.
  template <class Objective>
  BatchResult forward_only(std::span<const MicroBatch> batches, const Objective& objective,
      std::span<LayerCache> caches = {}, std::span<RoutingTape> tapes = {});

  void observe(StageObserver observer) { observer_ = std::move(observer); }

 private:
  using Run = ChunkRun;
  using Kind = StageLinks::Kind;

  template <class Objective>
  BatchResult execute(const std::vector<Action>& schedule, std::span<const MicroBatch> batches,
      const Objective& objective, std::span<LayerCache> caches, std::span<RoutingTape> tapes);
  void expect(const Action& action);
  Tensor forward_begin(Run& run);
  template <class Objective>
  void forward_end(Run& run, const Tensor& hidden, const Objective& objective);
  Tensor backward_begin(Run& run);
  void backward_end(Run& run, const Tensor& grad);
  void overlap(Run& forward, Tensor& hidden, Run& backward, Tensor& grad);

  LayerContext context(const Run& run, int64_t layer) const;
  LayerRun& attend(Run& run, int64_t layer, const Tensor& hidden);
  void attend_stage(const LayerContext& context, LayerRun& layer);
  void recompute(Run& run, LayerRun& layer);
  void dispatch(Run& run, LayerRun& layer);
  void experts(Run& run, LayerRun& layer);
  Tensor aggregate(Run& run, LayerRun& layer);
  void aggregate_stage(const LayerContext& context, LayerRun& layer);
  void aggregate_backward(Run& run, LayerRun& layer, const Tensor& grad);
  static void experts_backward(LayerRun& layer);
  Tensor attend_backward(LayerRun& layer);
  const UnitShards& shards_of(int64_t layer) const;
  void report(int64_t layer, const char* stage, const Tensor& tensor) const;
  bool grad_of(const LayerRun& layer) const {  // does its forward keep what its backward needs?
    return c10::GradMode::is_enabled() && (!recompute_ || layer.again);
  }

  Model& model_;
  const Mesh& mesh_;
  RotaryTable rotary_;
  RouterTraining router_;
  std::array<std::vector<int64_t>, 2> layers_;  // of this rank's two chunks
  StageLinks links_;
  const ModelShards* shards_;
  bool recompute_;
  bool defers_ = true;  // weight gradients over several actions: not where they are resharded
  StageObserver observer_;

  // Of the call under way.
  bool last_ = false;                     // is the backward under way the last one of its layers?
  std::array<std::vector<Run>, 2> runs_;  // [chunk][micro-batch]
  BatchResult result_;
};

}  // namespace pith
