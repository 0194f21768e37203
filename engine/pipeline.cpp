#include "engine/pipeline.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "models/deepseek_v2.h"
#include "models/gpt_oss.h"
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

void accumulate(Tensor& total, const Tensor& part) {
  if (part.defined()) total = total.defined() ? total + part : part;
}

}  // namespace

std::array<std::vector<int64_t>, 2> layers_of_rank(
    const std::vector<int64_t>& chunks, int64_t ranks, int64_t rank) {
  PITH_CHECK(chunks.size() == static_cast<size_t>(2 * ranks),
      "{} pipeline stages need {} chunks of layers, {} are given", ranks, 2 * ranks, chunks.size());
  std::array<std::vector<int64_t>, 2> layers;
  int64_t layer = 0;
  for (int64_t chunk = 0; chunk < 2 * ranks; ++chunk) {
    for (int64_t i = 0; i < chunks[static_cast<size_t>(chunk)]; ++i, ++layer) {
      if (chunk == rank) layers[0].push_back(layer);
      if (chunk == 2 * ranks - 1 - rank) layers[1].push_back(layer);
    }
  }
  return layers;
}

ModelPart model_part(const std::vector<int64_t>& chunks, const MeshShape& shape,
    const MeshPlace& place, int64_t num_experts) {
  PITH_CHECK(num_experts % shape.ep == 0, "parallel.ep {} does not divide the model's {} experts",
      shape.ep, num_experts);
  const int64_t experts = num_experts / shape.ep;
  ModelPart part{{}, place.pp == 0, place.pp == 0, experts * place.ep, experts * (place.ep + 1)};
  for (const std::vector<int64_t>& layers : layers_of_rank(chunks, shape.pp, place.pp))
    part.layers.insert(part.layers.end(), layers.begin(), layers.end());
  PITH_CHECK(place.pp == 0 || !part.layers.empty(),
      "pipeline stage {} of {} would hold no layer; lower parallel.pp", place.pp, shape.pp);
  return part;
}

template <DecoderModel Model>
Pipeline<Model>::Pipeline(Model& model, const Mesh& mesh, int64_t positions, RouterTraining router,
    std::vector<int64_t> chunks, const ModelShards* shards, bool recompute)
    : model_(model),
      mesh_(mesh),
      rotary_(model.rotary(positions, mesh.device)),
      router_(router),
      links_(mesh, model.config().hidden_size,
          model.parameter_units().front().front()->value.scalar_type()),
      shards_(shards),
      recompute_(recompute) {
  if (chunks.empty()) chunks = {model.config().num_layers, 0};
  layers_ = layers_of_rank(chunks, mesh.pipeline.size(), mesh.place.pp);
  if (shards != nullptr && !shards->layers.empty())
    defers_ = shards->layers.begin()->second.groups.front()->mode() == ShardMode::keep;
  const int64_t sum = std::accumulate(chunks.begin(), chunks.end(), int64_t{0});
  PITH_CHECK(sum == model.config().num_layers, "chunks of {} layers for a model of {}", sum,
      model.config().num_layers);
}

template <DecoderModel Model>
void Pipeline<Model>::report(int64_t layer, const char* stage, const Tensor& tensor) const {
  if (observer_ && tensor.defined())
    observer_(fmt::format("model.layers.{}.{}", layer, stage), tensor.detach());
}

template <DecoderModel Model>
LayerContext Pipeline<Model>::context(const Run& run, int64_t layer) const {
  LayerCache* cache = run.caches.empty() ? nullptr : &run.caches[static_cast<size_t>(layer)];
  return {*run.batch, mesh_, rotary_, router_, layer, cache, run.tape};
}

template <DecoderModel Model>
const UnitShards& Pipeline<Model>::shards_of(int64_t layer) const {
  static const UnitShards none;
  return shards_ == nullptr ? none : shards_->layers.at(layer);
}

// --- the five stages of a layer ---

template <DecoderModel Model>
LayerRun& Pipeline<Model>::attend(Run& run, int64_t index, const Tensor& hidden) {
  LayerRun& layer = run.layers.emplace_back();
  layer.layer = index;
  layer.hidden = leaf(hidden);
  shards_of(index).before_forward();
  const auto& indices = layers_[static_cast<size_t>(run.chunk)];
  if (index != indices.back()) shards_of(index + 1).prefetch();
  attend_stage(context(run, index), layer);
  report(index, "attend.rows", layer.attended.rows);
  report(index, "attend.residual", layer.attended.residual);
  accumulate(result_.balance_sum, layer.attended.balance);
  if (layer.attended.topk_idx.defined() && run.microbatch == 0) ++result_.num_moe_layers;
  return layer;
}

template <DecoderModel Model>
void Pipeline<Model>::attend_stage(const LayerContext& context, LayerRun& layer) {
  const c10::AutoGradMode keeps(grad_of(layer));
  layer.attended = model_.layer(layer.layer).attend(context, layer.hidden);
  layer.joined = layer.attended;
  layer.joined.residual = leaf(layer.attended.residual);
  layer.joined.rows = layer.shared_rows = leaf(layer.attended.rows);
  if (layer.attended.topk_idx.defined())
    layer.exchange =
        ExpertExchange(mesh_.expert, layer.attended.topk_idx, model_.config().num_experts);
}

template <DecoderModel Model>
void Pipeline<Model>::dispatch(Run& run, LayerRun& layer) {
  const c10::AutoGradMode keeps(grad_of(layer));
  if (layer.attended.topk_idx.defined())
    layer.exchange.dispatch(layer.attended.rows.detach(), layer.attended.topk_weight.detach());
  layer.shared = model_.layer(layer.layer).shared(context(run, layer.layer), layer.joined);
  report(layer.layer, "shared", layer.shared);
  layer.shared_leaf = leaf(layer.shared);
}

template <DecoderModel Model>
void Pipeline<Model>::experts(Run& run, LayerRun& layer) {
  if (!layer.attended.topk_idx.defined()) return;
  const c10::AutoGradMode keeps(grad_of(layer));
  layer.arrived = layer.exchange.arrive();
  layer.arrived.rows = leaf(layer.arrived.rows);
  layer.arrived.weight = leaf(layer.arrived.weight);
  layer.expert_out = model_.layer(layer.layer)
                         .experts(context(run, layer.layer), layer.arrived.rows,
                             layer.arrived.weight, layer.arrived.plan);
  report(layer.layer, "experts", layer.expert_out);
  if (!layer.again) layer.exchange.combine(layer.expert_out);
}

template <DecoderModel Model>
Tensor Pipeline<Model>::aggregate(Run& run, LayerRun& layer) {
  aggregate_stage(context(run, layer.layer), layer);
  report(layer.layer, "output", layer.output);
  shards_of(layer.layer).after_forward();
  Tensor output = layer.output;
  if (!c10::GradMode::is_enabled()) {
    run.layers.pop_back();
  } else if (recompute_) {
    LayerRun kept;
    kept.layer = layer.layer;
    kept.hidden = layer.hidden;
    kept.attended.topk_idx = layer.attended.topk_idx;
    layer = std::move(kept);
  }
  return output;
}

template <DecoderModel Model>
void Pipeline<Model>::aggregate_stage(const LayerContext& context, LayerRun& layer) {
  const c10::AutoGradMode keeps(grad_of(layer));
  // Its gradients don't depend on its values, so what came back need not travel again.
  if (layer.attended.topk_idx.defined())
    layer.returned = leaf(layer.again ? layer.attended.residual : layer.exchange.combined());
  layer.output =
      model_.layer(layer.layer).aggregate(context, layer.returned, layer.joined, layer.shared_leaf);
}

// The forward pass again for its graphs: by the same routes, counted and recorded no second time.
template <DecoderModel Model>
void Pipeline<Model>::recompute(Run& run, LayerRun& layer) {
  RoutingTape routes;
  routes.replay = true;
  routes.topk_idx.resize(static_cast<size_t>(layer.layer) + 1);
  routes.topk_idx.back() = layer.attended.topk_idx;
  LayerContext same = context(run, layer.layer);
  same.tape = &routes;
  layer.again = true;
  attend_stage(same, layer);
  dispatch(run, layer);
  experts(run, layer);
  aggregate_stage(same, layer);
}

template <DecoderModel Model>
void Pipeline<Model>::aggregate_backward(Run& run, LayerRun& layer, const Tensor& grad) {
  shards_of(layer.layer).before_backward();
  if (run.layers.size() > 1) shards_of(layer.layer - 1).prefetch();
  if (recompute_) recompute(run, layer);
  backward_stage({layer.output}, {grad});
  if (layer.returned.defined()) layer.exchange.combine_backward(take_grad(layer.returned));
  if (layer.shared.defined()) backward_stage({layer.shared}, {take_grad(layer.shared_leaf)});
}

template <DecoderModel Model>
void Pipeline<Model>::experts_backward(LayerRun& layer) {
  if (!layer.returned.defined()) return;
  backward_stage({layer.expert_out}, {layer.exchange.combined_grad()});
  layer.exchange.dispatch_backward(take_grad(layer.arrived.rows), take_grad(layer.arrived.weight));
}

template <DecoderModel Model>
Tensor Pipeline<Model>::attend_backward(LayerRun& layer) {
  std::vector<Tensor> roots{layer.attended.residual}, gradients{take_grad(layer.joined.residual)};
  Tensor grad_rows;
  if (layer.shared.defined()) grad_rows = take_grad(layer.shared_rows);
  if (layer.returned.defined()) {
    const auto [rows, weight] = layer.exchange.dispatched_grad();
    accumulate(grad_rows, rows);
    if (layer.attended.topk_weight.requires_grad()) {
      roots.push_back(layer.attended.topk_weight);
      gradients.push_back(weight);
    }
  }
  roots.push_back(layer.attended.rows);
  gradients.push_back(grad_rows);
  if (layer.attended.aux.defined()) {
    roots.push_back(layer.attended.aux);
    gradients.emplace_back();
  }
  backward_stage(std::move(roots), std::move(gradients));
  shards_of(layer.layer).after_backward(last_);
  return take_grad(layer.hidden);
}

// --- one chunk of one micro-batch ---

template <DecoderModel Model>
Tensor Pipeline<Model>::forward_begin(Run& run) {
  const MicroBatch& batch = *run.batch;
  PITH_CHECK(batch.max_seqlen <= rotary_.cos.size(0) || !run.caches.empty(),
      "a document of {} tokens is longer than the {} positions prepared", batch.max_seqlen,
      rotary_.cos.size(0));
  if (links_.receives(Kind::hidden, run.chunk))
    return links_.receive(Kind::hidden, run.chunk, batch.num_tokens());
  if (run.chunk == 1) return std::move(runs_[0][static_cast<size_t>(run.microbatch)].handed_over);
  if (shards_) shards_->embedding.before_forward();
  run.embedded = model_.embed(batch.tokens);
  if (shards_) shards_->embedding.after_forward();
  return run.embedded;
}

template <DecoderModel Model>
template <class Objective>
void Pipeline<Model>::forward_end(Run& run, const Tensor& hidden, const Objective& objective) {
  if (links_.sends(Kind::hidden, run.chunk)) {
    links_.send(Kind::hidden, run.chunk, hidden.detach());
  } else if (run.chunk == 0) {
    run.handed_over = hidden.detach();
  } else {
    run.hidden = leaf(hidden);
    const bool grad = c10::GradMode::is_enabled();  // the loss adds the head's gradient at once
    if (shards_) grad ? shards_->head.before_backward() : shards_->head.before_forward();
    ObjectiveResult value =
        objective(model_.final_norm(run.hidden), model_.head_weight(), *run.batch);
    if (shards_) grad ? shards_->head.after_backward() : shards_->head.after_forward();
    run.loss = value.loss;
    accumulate(result_.loss_sum, value.loss_sum);
    result_.per_token[static_cast<size_t>(run.microbatch)] = value.per_token;
  }
}

template <DecoderModel Model>
Tensor Pipeline<Model>::backward_begin(Run& run) {
  if (links_.receives(Kind::gradient, run.chunk))
    return links_.receive(Kind::gradient, run.chunk, run.batch->num_tokens());
  if (run.chunk == 0) return std::move(runs_[1][static_cast<size_t>(run.microbatch)].handed_over);
  if (shards_) shards_->head.before_backward();
  backward_stage({run.loss}, {Tensor()});
  if (shards_) shards_->head.after_backward(last_);
  run.loss.reset();
  Tensor grad = take_grad(run.hidden);
  run.hidden.reset();
  return grad;
}

template <DecoderModel Model>
void Pipeline<Model>::backward_end(Run& run, const Tensor& grad) {
  if (links_.sends(Kind::gradient, run.chunk)) {
    links_.send(Kind::gradient, run.chunk, grad);
  } else if (run.chunk == 1) {
    run.handed_over = grad;
  } else {
    if (shards_) shards_->embedding.before_backward();
    backward_stage({run.embedded}, {grad});
    if (shards_) shards_->embedding.after_backward(last_);
    run.embedded.reset();
  }
}

// Layers of one micro-batch forward against layers of another backward: while one waits for rows on
// their way, the other computes. `hidden` and `grad` move through as many layers as both have.
template <DecoderModel Model>
void Pipeline<Model>::overlap(Run& forward, Tensor& hidden, Run& backward, Tensor& grad) {
  const auto& indices = layers_[static_cast<size_t>(forward.chunk)];
  const size_t pairs = std::min(indices.size(), backward.layers.size());
  for (size_t i = 0; i < pairs; ++i) {
    LayerRun& b = backward.layers.back();
    aggregate_backward(backward, b, grad);  // gradients start for the experts
    LayerRun& f = attend(forward, indices[i], hidden);
    std::vector<WeightGradient> weights;
    {
      const DeferWeightGradients defer(weights);
      experts_backward(b);  // and come back during what follows
    }
    dispatch(forward, f);  // rows start for the experts
    for (const WeightGradient& job : weights) add_weight_gradient(job);
    experts(forward, f);  // results come back during the next line
    grad = attend_backward(b);
    backward.layers.pop_back();  // frees its activations
    hidden = aggregate(forward, f);
  }
}

// --- the schedule ---

template <DecoderModel Model>
void Pipeline<Model>::expect(const Action& action) {
  using enum Action::Kind;
  const auto post = [&](Kind kind, int chunk, int64_t microbatch) {
    const Run& run = runs_[static_cast<size_t>(chunk)][static_cast<size_t>(microbatch)];
    if (links_.receives(kind, chunk)) links_.expect(kind, chunk, run.batch->num_tokens());
  };
  if (action.kind == forward || action.kind == overlapped)
    post(Kind::hidden, action.chunk, action.microbatch);
  if (action.kind == backward || action.kind == backward_input)
    post(Kind::gradient, action.chunk, action.microbatch);
  if (action.kind == overlapped)
    post(Kind::gradient, action.backward_chunk, action.backward_microbatch);
}

template <DecoderModel Model>
template <class Objective>
BatchResult Pipeline<Model>::execute(const std::vector<Action>& schedule,
    std::span<const MicroBatch> batches, const Objective& objective, std::span<LayerCache> caches,
    std::span<RoutingTape> tapes) {
  using enum Action::Kind;
  result_ = {};
  if (mesh_.place.pp == 0) result_.per_token.resize(batches.size());
  for (const int chunk : {0, 1}) {
    auto& runs = runs_[static_cast<size_t>(chunk)] = std::vector<Run>(batches.size());
    for (size_t i = 0; i < runs.size(); ++i) {
      runs[i].batch = &batches[i];
      runs[i].caches = caches;
      runs[i].tape = tapes.empty() ? nullptr : &tapes[i];
      runs[i].chunk = chunk;
      runs[i].microbatch = static_cast<int64_t>(i);
    }
  }
  for (RoutingTape& tape : tapes) {
    const auto layers = static_cast<size_t>(model_.config().num_layers);
    if (!tape.replay) tape.topk_idx.assign(layers, {}), tape.topk_weight.assign(layers, {});
  }
  const auto finish_forward = [&](Run& run, Tensor hidden) {
    const auto& indices = layers_[static_cast<size_t>(run.chunk)];
    const bool grad = c10::GradMode::is_enabled();
    for (size_t i = grad ? run.layers.size() : 0; i < indices.size(); ++i) {
      LayerRun& layer = attend(run, indices[i], hidden);
      dispatch(run, layer);
      experts(run, layer);
      hidden = aggregate(run, layer);
    }
    forward_end(run, hidden, objective);
  };
  const auto finish_backward = [&](Run& run, Tensor grad) {
    while (!run.layers.empty()) {
      LayerRun& layer = run.layers.back();
      aggregate_backward(run, layer, grad);
      experts_backward(layer);
      grad = attend_backward(layer);
      run.layers.pop_back();  // frees its activations
    }
    backward_end(run, grad);
  };

  if (!schedule.empty()) expect(schedule[0]);
  for (size_t i = 0; i < schedule.size(); ++i) {
    const Action& action = schedule[i];
    Run& run = runs_[static_cast<size_t>(action.chunk)][static_cast<size_t>(action.microbatch)];
    const int64_t backward_of =
        action.kind == overlapped ? action.backward_microbatch : action.microbatch;
    last_ = backward_of + 1 == std::ssize(batches) && !(action.kind == backward_input && defers_);
    Tensor hidden, grad;
    if (action.kind == forward || action.kind == overlapped) hidden = forward_begin(run);
    if (action.kind == overlapped) {
      Run& other = runs_[static_cast<size_t>(action.backward_chunk)]
                        [static_cast<size_t>(action.backward_microbatch)];
      grad = backward_begin(other);
      if (i + 1 < schedule.size()) expect(schedule[i + 1]);
      overlap(run, hidden, other, grad);
      finish_backward(other, grad);
      finish_forward(run, hidden);
      continue;
    }
    if (action.kind == backward || action.kind == backward_input) grad = backward_begin(run);
    if (i + 1 < schedule.size()) expect(schedule[i + 1]);  // arrives during this action
    if (action.kind == forward) {
      finish_forward(run, hidden);
    } else if (action.kind == backward || (action.kind == backward_input && !defers_)) {
      finish_backward(run, grad);
    } else if (action.kind == backward_input) {
      const DeferWeightGradients defer(run.deferred);
      finish_backward(run, grad);
    } else {
      for (const WeightGradient& job : run.deferred) add_weight_gradient(job);
      run.deferred.clear();
      if (last_ && shards_ && defers_)  // otherwise the backward was the last
        for (const int64_t layer : layers_[static_cast<size_t>(action.chunk)])
          shards_of(layer).after_backward(true);
    }
  }
  links_.finish();
  for (auto& runs : runs_) runs.clear();
  return std::move(result_);
}

template <DecoderModel Model>
template <class Objective>
BatchResult Pipeline<Model>::forward_backward(
    std::span<const MicroBatch> batches, const Objective& objective, std::span<RoutingTape> tapes) {
  const bool overlap = mesh_.pipeline.size() > 1 || mesh_.expert.size() > 1;
  return execute(make_schedule(mesh_.pipeline.size(), mesh_.place.pp,
                     static_cast<int64_t>(batches.size()), overlap),
      batches, objective, {}, tapes);
}

template <DecoderModel Model>
template <class Objective>
BatchResult Pipeline<Model>::forward_only(std::span<const MicroBatch> batches,
    const Objective& objective, std::span<LayerCache> caches, std::span<RoutingTape> tapes) {
  PITH_CHECK(caches.empty() || mesh_.world.size() == 1, "generation runs in one process only");
  const c10::AutoGradMode no_grad(false);
  return execute(
      forward_schedule(static_cast<int64_t>(batches.size())), batches, objective, caches, tapes);
}

#define PITH_OBJECTIVE(Model, Objective)                                          \
  template BatchResult Pipeline<Model>::forward_only(std::span<const MicroBatch>, \
      const Objective&, std::span<LayerCache>, std::span<RoutingTape>)
#define PITH_FAMILY(Model)                                                        \
  template class Pipeline<Model>;                                                 \
  template BatchResult Pipeline<Model>::forward_backward(                         \
      std::span<const MicroBatch>, const NextTokenLoss&, std::span<RoutingTape>); \
  PITH_OBJECTIVE(Model, NextTokenLoss);                                           \
  PITH_OBJECTIVE(Model, LastTokenLogits);                                         \
  PITH_OBJECTIVE(Model, AllLogits)
PITH_FAMILY(Qwen3MoeModel);
PITH_FAMILY(DeepseekV2Model);
PITH_FAMILY(GptOssModel);
#undef PITH_FAMILY
#undef PITH_OBJECTIVE

}  // namespace pith
