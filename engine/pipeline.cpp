#include "engine/pipeline.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "models/qwen3_moe.h"

namespace pith {
namespace {

// The same values as the start of a new graph.
Tensor leaf(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  Tensor detached = tensor.detach();
  if (c10::GradMode::is_enabled()) detached.set_requires_grad(true);
  return detached;
}

// Backward through one stage: gradients flow from `roots` to the stage's leaves. An undefined
// gradient counts as 1 (scalar roots); a root nobody needed has no gradient and is left out.
void backward_stage(std::vector<Tensor> roots, std::vector<Tensor> gradients) {
  torch::autograd::backward(roots, gradients);
}

Tensor take_grad(Tensor& from) {
  Tensor grad = from.mutable_grad();
  from.mutable_grad().reset();
  return grad;
}

Tensor sum_defined(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a + b : a;
}

void accumulate(Tensor& total, const Tensor& part) {
  if (part.defined()) total = sum_defined(total, part);
}

}  // namespace

std::vector<Action> make_schedule(int64_t num_microbatches) {
  std::vector<Action> schedule;
  for (int64_t i = 0; i < num_microbatches; ++i) {
    schedule.push_back({Action::Kind::forward, i});
    schedule.push_back({Action::Kind::backward, i});
  }
  return schedule;
}

std::string to_string(const std::vector<Action>& schedule) {
  std::string text;
  for (const Action& action : schedule) {
    text += fmt::format("{}{}{}", text.empty() ? "" : " ",
                        action.kind == Action::Kind::forward ? 'F' : 'B', action.microbatch);
  }
  return text;
}

template <DecoderModel Model>
struct Pipeline<Model>::Run {
  const MicroBatch* batch;
  std::span<LayerCache> caches;
  RoutingTape* tape;
  Tensor embedded;               // (T, H) output of the embedding, inside its graph
  std::vector<LayerRun> layers;  // emptied from the back by the backward pass
  Tensor hidden;                 // (T, H) leaf of the head
  Tensor loss;                   // root of the head
};

template <DecoderModel Model>
Pipeline<Model>::Pipeline(Model& model, const Mesh& mesh, int64_t positions, RouterTraining router)
    : model_(model), mesh_(mesh), rotary_(model.rotary(positions, mesh.device)), router_(router) {}

template <DecoderModel Model>
void Pipeline<Model>::report(int64_t layer, const char* stage, const Tensor& tensor) const {
  if (observer_ && tensor.defined())
    observer_(fmt::format("model.layers.{}.{}", layer, stage), tensor.detach());
}

template <DecoderModel Model>
Tensor Pipeline<Model>::forward_layer(const LayerContext& context, const Tensor& hidden,
                                      LayerRun& run) {
  auto& layer = model_.layer(context.layer);
  run.hidden = leaf(hidden);
  run.attended = layer.attend(context, run.hidden);
  report(context.layer, "attend.rows", run.attended.rows);
  report(context.layer, "attend.residual", run.attended.residual);
  run.joined = run.attended;
  run.joined.residual = leaf(run.attended.residual);
  run.joined.rows = run.shared_rows = leaf(run.attended.rows);

  run.shared = layer.shared(context, run.joined);
  report(context.layer, "shared", run.shared);
  run.shared_leaf = leaf(run.shared);

  if (run.attended.topk_idx.defined()) {
    // Dispatch and combine: with one rank in the expert group every row stays where it is.
    const std::vector<int64_t> all_rows{run.attended.rows.size(0)};
    run.rows = leaf(mesh_.expert.all_to_all(run.attended.rows.detach(), all_rows, all_rows));
    run.weight = leaf(mesh_.expert.all_to_all(run.attended.topk_weight.detach(), all_rows, all_rows));
    run.plan = make_expert_plan(run.attended.topk_idx, model_.config().num_experts);
    run.expert_out = layer.experts(context, run.rows, run.weight, run.plan);
    report(context.layer, "experts", run.expert_out);
    run.returned = leaf(mesh_.expert.all_to_all(run.expert_out.detach(), all_rows, all_rows));
  }
  run.output = layer.aggregate(context, run.returned, run.joined, run.shared_leaf);
  report(context.layer, "output", run.output);
  return run.output;
}

template <DecoderModel Model>
Tensor Pipeline<Model>::backward_layer(LayerRun& run, const Tensor& grad_output) {
  backward_stage({run.output}, {grad_output});
  Tensor grad_residual = take_grad(run.joined.residual);
  std::vector<Tensor> roots{run.attended.residual}, gradients{grad_residual};
  Tensor grad_rows;
  if (run.shared.defined()) {
    backward_stage({run.shared}, {take_grad(run.shared_leaf)});
    grad_rows = take_grad(run.shared_rows);
  }
  if (run.returned.defined()) {
    const std::vector<int64_t> all_rows{run.rows.size(0)};
    backward_stage({run.expert_out}, {mesh_.expert.all_to_all(take_grad(run.returned), all_rows, all_rows)});
    accumulate(grad_rows, mesh_.expert.all_to_all(take_grad(run.rows), all_rows, all_rows));
    const Tensor grad_weight = mesh_.expert.all_to_all(take_grad(run.weight), all_rows, all_rows);
    if (run.attended.topk_weight.requires_grad()) {
      roots.push_back(run.attended.topk_weight);
      gradients.push_back(grad_weight);
    }
  }
  roots.push_back(run.attended.rows);
  gradients.push_back(grad_rows);
  if (run.attended.aux.defined()) {
    roots.push_back(run.attended.aux);
    gradients.emplace_back();
  }
  backward_stage(std::move(roots), std::move(gradients));
  return take_grad(run.hidden);
}

template <DecoderModel Model>
template <class Objective>
void Pipeline<Model>::forward(Run& run, const Objective& objective, BatchResult& result) {
  const MicroBatch& batch = *run.batch;
  PITH_CHECK(batch.max_seqlen <= rotary_.cos.size(0) || !run.caches.empty(),
             "a document of {} tokens is longer than the {} positions prepared", batch.max_seqlen,
             rotary_.cos.size(0));
  const int64_t num_layers = model_.config().num_layers;
  if (run.tape != nullptr && !run.tape->replay) {
    run.tape->topk_idx.assign(static_cast<size_t>(num_layers), {});
    run.tape->topk_weight.assign(static_cast<size_t>(num_layers), {});
  }
  run.embedded = model_.embed(batch.tokens);
  Tensor hidden = run.embedded;
  Tensor balance;
  int64_t moe_layers = 0;
  for (int64_t i = 0; i < num_layers; ++i) {
    LayerCache* cache = run.caches.empty() ? nullptr : &run.caches[static_cast<size_t>(i)];
    const LayerContext context{batch, mesh_, rotary_, router_, i, cache, run.tape};
    LayerRun layer;
    hidden = forward_layer(context, hidden, layer);
    accumulate(balance, layer.attended.balance);
    moe_layers += layer.attended.topk_idx.defined() ? 1 : 0;
    if (c10::GradMode::is_enabled()) run.layers.push_back(std::move(layer));
  }
  run.hidden = leaf(hidden);
  ObjectiveResult value = objective(model_.final_norm(run.hidden), model_.head_weight(), batch);
  run.loss = value.loss;
  result.num_moe_layers = moe_layers;
  accumulate(result.loss_sum, value.loss_sum);
  accumulate(result.balance_sum, balance);
  result.per_token.push_back(value.per_token);
}

template <DecoderModel Model>
void Pipeline<Model>::backward(Run& run) {
  backward_stage({run.loss}, {Tensor()});
  Tensor grad = take_grad(run.hidden);
  run.loss.reset();
  while (!run.layers.empty()) {
    grad = backward_layer(run.layers.back(), grad);
    run.layers.pop_back();  // frees its activations
  }
  backward_stage({run.embedded}, {grad});
}

template <DecoderModel Model>
template <class Objective>
BatchResult Pipeline<Model>::forward_backward(std::span<const MicroBatch> batches,
                                              const Objective& objective,
                                              std::span<RoutingTape> tapes) {
  BatchResult result;
  std::vector<Run> runs(batches.size());
  for (const Action& action : make_schedule(static_cast<int64_t>(batches.size()))) {
    const auto i = static_cast<size_t>(action.microbatch);
    if (action.kind == Action::Kind::forward) {
      runs[i].batch = &batches[i];
      runs[i].tape = tapes.empty() ? nullptr : &tapes[i];
      forward(runs[i], objective, result);
    } else {
      backward(runs[i]);
      runs[i] = {};
    }
  }
  return result;
}

template <DecoderModel Model>
template <class Objective>
BatchResult Pipeline<Model>::forward_only(std::span<const MicroBatch> batches,
                                          const Objective& objective, std::span<LayerCache> caches,
                                          std::span<RoutingTape> tapes) {
  const c10::AutoGradMode no_grad(false);
  BatchResult result;
  for (size_t i = 0; i < batches.size(); ++i) {
    Run run;
    run.batch = &batches[i];
    run.caches = caches;
    run.tape = tapes.empty() ? nullptr : &tapes[i];
    forward(run, objective, result);
  }
  return result;
}

template class Pipeline<Qwen3MoeModel>;
#define PITH_INSTANTIATE(Model, Objective)                                                    \
  template BatchResult Pipeline<Model>::forward_backward(                                     \
      std::span<const MicroBatch>, const Objective&, std::span<RoutingTape>);                 \
  template BatchResult Pipeline<Model>::forward_only(std::span<const MicroBatch>,             \
                                                     const Objective&, std::span<LayerCache>, \
                                                     std::span<RoutingTape>)
PITH_INSTANTIATE(Qwen3MoeModel, NextTokenLoss);
#undef PITH_INSTANTIATE
template BatchResult Pipeline<Qwen3MoeModel>::forward_only(std::span<const MicroBatch>,
                                                           const LastTokenLogits&,
                                                           std::span<LayerCache>,
                                                           std::span<RoutingTape>);
template BatchResult Pipeline<Qwen3MoeModel>::forward_only(std::span<const MicroBatch>,
                                                           const AllLogits&, std::span<LayerCache>,
                                                           std::span<RoutingTape>);

}  // namespace pith
