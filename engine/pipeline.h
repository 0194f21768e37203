// Runs micro-batches through a model in five-stage layers: forward, backward, forward only.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/objectives.h"
#include "models/model.h"

namespace pith {

// Sums over the micro-batches of one call, left on the device: nobody waits.
struct BatchResult {
  Tensor loss_sum;     // scalar float32: sum of token losses
  Tensor balance_sum;  // scalar float32: balance loss summed over rows and MoE layers, or undefined
  int64_t num_moe_layers = 0;
  std::vector<Tensor> per_token;  // the objective's report, one tensor a micro-batch
};

// Sees stage outputs by name ("model.layers.3.attend.rows") where a caller asks: traces, the search
// for a NaN.
using StageObserver = std::function<void(const std::string& name, const Tensor& tensor)>;

// One action of the schedule: forward or backward of a micro-batch.
struct Action {
  enum class Kind { forward, backward } kind;
  int64_t microbatch;
};
// What this process executes for n micro-batches, in order: F0 B0 F1 B1 ...
std::vector<Action> make_schedule(int64_t num_microbatches);
std::string to_string(const std::vector<Action>& schedule);

// Everything one layer of one micro-batch keeps from its forward to its backward pass.
struct LayerRun {
  Tensor hidden;        // (T, H) leaf
  Attended attended;    // outputs of stage 1, inside its graph
  Attended joined;      // the same values as leaves of the later stages
  Tensor shared_rows;   // (T, H) leaf of shared()
  Tensor rows, weight;  // leaves of stage 3, after dispatch
  ExpertPlan plan;
  Tensor expert_out;             // output of stage 3
  Tensor returned, shared_leaf;  // leaves of stage 5
  Tensor shared;                 // output of shared()
  Tensor output;                 // (T, H)
};

template <DecoderModel Model>
class Pipeline {
 public:
  // `positions`: rows of the rotary table, at least the longest document.
  Pipeline(Model& model, const Mesh& mesh, int64_t positions, RouterTraining router);

  // Adds the gradients of the mean loss over the global batch (and of the balance losses) to every
  // Parameter::grad. `tapes`: one a micro-batch to record or replay routes, or empty.
  template <class Objective>
  BatchResult forward_backward(std::span<const MicroBatch> batches, const Objective& objective,
                               std::span<RoutingTape> tapes = {});

  // The same schedule without gradients. `caches`: one a layer while generating, or empty.
  template <class Objective>
  BatchResult forward_only(std::span<const MicroBatch> batches, const Objective& objective,
                           std::span<LayerCache> caches = {}, std::span<RoutingTape> tapes = {});

  void observe(StageObserver observer) { observer_ = std::move(observer); }

 private:
  struct Run;  // one micro-batch in flight
  template <class Objective>
  void forward(Run& run, const Objective& objective, BatchResult& result);
  void backward(Run& run);
  Tensor forward_layer(const LayerContext& context, const Tensor& hidden, LayerRun& run);
  Tensor backward_layer(LayerRun& run, const Tensor& grad_output);
  void report(int64_t layer, const char* stage, const Tensor& tensor) const;

  Model& model_;
  const Mesh& mesh_;
  RotaryTable rotary_;
  RouterTraining router_;
  StageObserver observer_;
};

}  // namespace pith
