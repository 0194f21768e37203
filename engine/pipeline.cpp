#include "engine/pipeline.h"
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include "engine/expert_parallel.h"
#include "engine/metrics.h"
#include "models/deepseek_v2.h"
#include "models/gpt_oss.h"
#include "models/qwen3_5_moe.h"
#include "models/qwen3_moe.h"
#include "operators/matmul.h"

namespace pith {
namespace {
// The same values as the start of a new graph.
Tensor leaf(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  Tensor detached = tensor.detach();
  if (c10::GradMode::is_enabled()) detached.set_requires_grad(true);
  return detached;
}

// Backward through one stage, from its output to its leaves.
void backward_stage(const Tensor& output, const Tensor& gradient) {
  torch::autograd::backward({output}, {gradient});
}

Tensor take_grad(const Tensor& from) {
  Tensor grad = from.mutable_grad();
  from.mutable_grad().reset();
  return grad;
}

void accumulate(Tensor& total, const Tensor& part) {
  if (part.defined()) total = total.defined() ? total + part : part;
}

// What one layer of one micro-batch keeps for its backward pass.
struct LayerRun {
  int64_t layer;
  Tensor hidden; // (T, H) leaf; where layers are recomputed only this and topk_idx stay
  Attended attended; // in the graph of stage 1
  Tensor aux; // balance loss times coefficient, a root of stage 1, or undefined
  Attended joined; // the same as leaves of later stages
  Tensor shared_rows; // (T, H) leaf of shared()
  ExpertExchange exchange;
  ExpertExchange::Arrived arrived; // leaves of stage 3
  Tensor expert_out; // output of stage 3
  Tensor returned, shared_leaf; // leaves of stage 5
  Tensor shared; // output of shared()
  Tensor output; // (T, H)
  bool again = false; // recomputed in the backward pass
  RoutingTape routes; // with these routes
};

struct Run {
  const MicroBatch* batch;
  span<LayerCache> caches;
  RoutingTape* tape;
  int chunk;
  int64_t microbatch;
  Tensor embedded = {}; // (T, H), in the embedding's graph
  vector<LayerRun> layers = {}; // the backward pass pops the last
  Tensor hidden = {}; // (T, H) leaf of the head
  Tensor loss = {}; // root of the head
  Tensor handed_over = {}; // where both chunks meet on the last stage: hidden, then gradient
  vector<WeightGradient> deferred = {};
};

array<vector<int64_t>, 2> layers_of_rank(
  const vector<int64_t>& chunks, int64_t ranks, int64_t rank) {
  PITH_CHECK(ssize(chunks) == 2 * ranks,
    "{} pipeline stages need {} chunks of layers, {} are given", ranks, 2 * ranks, chunks.size());
  const auto layers = [&](int64_t chunk) {
    vector<int64_t> result(index(chunks[index(chunk)]));
    const auto first = reduce(chunks.begin(), chunks.begin() + chunk);
    std::iota(result.begin(), result.end(), first);
    return result;
  };
  return {layers(rank), layers(2 * ranks - 1 - rank)};
}

// In a group of two: `out` goes to the other, `in` comes from it.
Work transfer(const Comm& pair, Tensor& in, const Tensor& out) {
  vector<int64_t> received(2), sent(2);
  received[index(1 - pair.rank())] = in.size(0);
  sent[index(1 - pair.rank())] = out.size(0);
  return pair.all_to_all_async(in, out, received, sent);
}

// One-way flows between neighbouring stages: hidden states and gradients of chunk 0 (down), chunk 1
// (up), a shared head; a group each, in order of micro-batches: none waits for another.
struct StageLink {
  const Comm *from, *to; // null: not another stage
  TensorOptions options;
  int64_t hidden_size;
  size_t ahead; // messages that may be under way
  deque<Work> sent = {};

  // (tokens, H). Asked for only when needed: NCCL holds processors while it waits, and a GPU that
  // computes meanwhile loses more by that than the transfer takes.
  Tensor receive(int64_t tokens) {
    Tensor tensor = at::empty({tokens, hidden_size}, options);
    transfer(*from, tensor, tensor.narrow(0, 0, 0)).wait();
    return tensor;
  }
  void send(const Tensor& tensor) {
    Tensor nothing = tensor.narrow(0, 0, 0);
    sent.push_back(transfer(*to, nothing, tensor.contiguous()));
    if (sent.size() > ahead) wait_for_oldest();
  }
  void finish() {
    while (!sent.empty()) wait_for_oldest();
  }
 private:
  void wait_for_oldest() {
    sent.front().wait();
    sent.pop_front();
  }
};

// [2 * chunk + (1 for gradients)]; a shared head is a third chunk.
deque<StageLink> stage_links(const Mesh& mesh, int64_t hidden_size, ScalarType dtype) {
  const auto options = TensorOptions(mesh.device);
  const bool first = mesh.place.pp == 0, last = mesh.place.pp + 1 == mesh.shape.pp;
  deque<StageLink> links;
  for (size_t i = 0; i < (mesh.shape.head_share > 0 ? 6U : 4U); ++i) {
    // Groups connect at their first message and wait for the other side: here, not behind one.
    for (const Comm& group: {mesh.previous[i], mesh.next[i]}) {
      if (group.size() == 1) continue;
      Tensor in = at::empty({1}, options.dtype(kFloat));
      transfer(group, in, at::zeros_like(in)).wait();
    }
    const Comm *from = first ? nullptr : &mesh.previous[i], *to = last ? nullptr : &mesh.next[i];
    const bool down = i == 0 || i == 3 || i == 4;
    if (!down) std::swap(from, to);
    // A stage is at most 2 P + 1 micro-batches ahead: older messages have arrived.
    links.push_back({from, to, options.dtype(dtype), hidden_size, index(2 * mesh.shape.pp + 1)});
  }
  return links;
}
}

ModelPart model_part(const vector<int64_t>& chunks, const MeshShape& shape, const MeshPlace& place,
  const ModelConfig& config) {
  PITH_CHECK(config.num_experts % shape.ep == 0,
    "parallel.ep {} does not divide the model's {} experts", shape.ep, config.num_experts);
  PITH_CHECK(shape.head_share == 0 || !config.tie_embeddings,
    "parallel.head_share {}: a head tied to the embedding stays on one stage", shape.head_share);
  const int64_t experts = config.num_experts / shape.ep;
  const bool head = place.pp == 0 || (place.pp == 1 && shape.head_share > 0);
  ModelPart part{{}, place.pp == 0, head, experts * place.ep, experts * (place.ep + 1)};
  for (const vector<int64_t>& layers: layers_of_rank(chunks, shape.pp, place.pp))
    part.layers.insert(part.layers.end(), layers.begin(), layers.end());
  PITH_CHECK(place.pp == 0 || !part.layers.empty(),
    "pipeline stage {} of {} would hold no layer; lower parallel.pp", place.pp, shape.pp);
  return part;
}

template <DecoderModel Model> struct Pipeline<Model>::Impl {
  Model& model_;
  const Mesh& mesh_;
  RotaryTable rotary_;
  RouterTraining router_;
  array<vector<int64_t>, 2> layers_; // of this rank's two chunks
  deque<StageLink> links_;
  ModelShards shards_;
  bool recompute_;
  bool defers_; // weight gradients over several actions: not if resharded
  StageObserver observer_ = {};

  bool last_ = false; // is this the last backward of its layers?
  array<vector<Run>, 2> runs_ = {}; // [chunk][micro-batch]
  BatchResult result_ = {};

  void report(int64_t layer, const char* stage, const Tensor& tensor) const {
    if (observer_ && tensor.defined())
      observer_(fmt::format("model.layers.{}.{}", layer, stage), tensor.detach());
  }
  LayerContext context(const Run& run, LayerRun& layer) const {
    LayerCache* cache = run.caches.empty() ? nullptr : &run.caches[index(layer.layer)];
    return {*run.batch, mesh_, rotary_, router_, layer.layer, cache,
      layer.again ? &layer.routes : run.tape};
  }
  const UnitShards& shards_of(int64_t layer) { return shards_.layers[layer]; }
  bool grad_of(const LayerRun& layer) const { // does its forward keep what its backward needs?
    return c10::GradMode::is_enabled() && (!recompute_ || layer.again);
  }
  Run& run_of(int chunk, int64_t microbatch) { return runs_[index(chunk)][index(microbatch)]; }
  const vector<int64_t>& layers_of(const Run& run) const { return layers_[index(run.chunk)]; }
  StageLink& hidden_link(const Run& run) { return links_[run.chunk == 0 ? 0 : 2]; }
  StageLink& gradient_link(const Run& run) { return links_[run.chunk == 0 ? 1 : 3]; }
  // A micro-batch's last tokens, whose head the second stage computes in training.
  int64_t shared_tokens(const MicroBatch& batch) const {
    if (!c10::GradMode::is_enabled()) return 0;
    return std::llround(mesh_.shape.head_share * real(batch.num_tokens()));
  }

  // --- the five stages of a layer ---

  LayerRun& attend(Run& run, int64_t number, const Tensor& hidden) {
    const StageRange range("attend", number);
    LayerRun& layer = run.layers.emplace_back();
    layer.layer = number;
    layer.hidden = leaf(hidden);
    shards_of(number).before_forward();
    if (number != layers_of(run).back()) shards_of(number + 1).prefetch();
    attend_stage(run, layer);
    report(number, "attend.rows", layer.attended.rows);
    report(number, "attend.residual", layer.attended.residual);
    if (layer.attended.topk_idx.defined() && run.microbatch == 0) ++result_.num_moe_layers;
    return layer;
  }

  void attend_stage(const Run& run, LayerRun& layer) {
    const c10::AutoGradMode keeps(grad_of(layer));
    layer.attended = model_.layer(layer.layer).attend(context(run, layer), layer.hidden);
    layer.joined = layer.attended;
    layer.joined.residual = leaf(layer.attended.residual);
    layer.joined.rows = layer.shared_rows = leaf(layer.attended.rows);
    if (layer.attended.topk_idx.defined())
      layer.exchange =
        ExpertExchange(mesh_.expert, layer.attended.topk_idx, model_.config().num_experts);
  }

  void dispatch(const Run& run, LayerRun& layer) {
    const StageRange range("dispatch", layer.layer);
    const c10::AutoGradMode keeps(grad_of(layer));
    if (layer.attended.topk_idx.defined())
      layer.exchange.dispatch(layer.attended.rows.detach(), layer.attended.topk_weight.detach());
    layer.shared = model_.layer(layer.layer).shared(context(run, layer), layer.joined);
    report(layer.layer, "shared", layer.shared);
    layer.shared_leaf = leaf(layer.shared);
  }

  void experts(const Run& run, LayerRun& layer) {
    const StageRange range("experts", layer.layer);
    if (!layer.attended.topk_idx.defined()) return;
    const c10::AutoGradMode keeps(grad_of(layer));
    auto& [rows, weight, plan] = layer.arrived = layer.exchange.arrive();
    rows = leaf(rows);
    weight = leaf(weight);
    layer.expert_out = model_.layer(layer.layer).experts(context(run, layer), rows, weight, plan);
    report(layer.layer, "experts", layer.expert_out);
    if (!layer.again) layer.exchange.combine(layer.expert_out);
  }

  Tensor aggregate(Run& run, LayerRun& layer) {
    const StageRange range("aggregate", layer.layer);
    aggregate_stage(run, layer);
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

  void aggregate_stage(const Run& run, LayerRun& layer) {
    const c10::AutoGradMode keeps(grad_of(layer));
    if (layer.attended.balance) balance(*run.batch, layer);
    // Its gradients don't depend on its values: what came back need not travel again.
    if (layer.attended.topk_idx.defined())
      layer.returned = leaf(layer.again ? layer.attended.residual : layer.exchange.combined());
    layer.output =
      model_.layer(layer.layer)
        .aggregate(context(run, layer), layer.returned, layer.joined, layer.shared_leaf);
  }

  void balance(const MicroBatch& batch, LayerRun& layer) {
    const auto [loss, counts] = exchange(layer.attended.balance, {})();
    const Tensor& z = layer.attended.z_sum;
    if (router_.balance_loss > 0)
      layer.aux = loss * (router_.balance_loss / real(batch.global_rows));
    if (z.defined())
      accumulate(layer.aux, z * (router_.z_loss / real(batch.global_trained_tokens)));
    if (layer.again) return;
    accumulate(result_.balance_sum, loss.detach());
    if (z.defined()) accumulate(result_.z_sum, z.detach());
    if (!result_.expert_counts.defined())
      result_.expert_counts =
        at::zeros({model_.config().num_layers, counts.numel()}, counts.options());
    result_.expert_counts[layer.layer] += counts;
  }

  // The forward pass again, for its graphs: same routes, not counted or recorded again.
  void recompute(const Run& run, LayerRun& layer) {
    layer.again = layer.routes.replay = true;
    layer.routes.topk_idx.resize(index(layer.layer) + 1);
    layer.routes.topk_idx.back() = layer.attended.topk_idx;
    attend_stage(run, layer);
    dispatch(run, layer);
    experts(run, layer);
    aggregate_stage(run, layer);
  }

  void aggregate_backward(Run& run, LayerRun& layer, const Tensor& grad) {
    const StageRange range("aggregate backward", layer.layer);
    shards_of(layer.layer).before_backward();
    if (run.layers.size() > 1) shards_of(layer.layer - 1).prefetch();
    if (recompute_) recompute(run, layer);
    backward_stage(layer.output, grad);
    if (layer.returned.defined()) layer.exchange.combine_backward(take_grad(layer.returned));
    if (layer.shared.defined()) backward_stage(layer.shared, take_grad(layer.shared_leaf));
  }

  static void experts_backward(LayerRun& layer) {
    const StageRange range("experts backward", layer.layer);
    if (!layer.returned.defined()) return;
    backward_stage(layer.expert_out, layer.exchange.combined_grad());
    auto& [rows, weight, plan] = layer.arrived;
    layer.exchange.dispatch_backward(take_grad(rows), take_grad(weight));
  }

  Tensor attend_backward(LayerRun& layer) {
    const StageRange range("attend backward", layer.layer);
    // An undefined gradient counts as 1 (scalar roots); a root nobody needed is left out.
    vector<Tensor> roots{layer.attended.residual}, grads{take_grad(layer.joined.residual)};
    const auto root = [&](const Tensor& tensor, const Tensor& grad) {
      roots.push_back(tensor);
      grads.push_back(grad);
    };
    Tensor grad_rows;
    if (layer.shared.defined()) grad_rows = take_grad(layer.shared_rows);
    if (layer.returned.defined()) {
      const auto [rows, weight] = layer.exchange.dispatched_grad();
      accumulate(grad_rows, rows);
      if (layer.attended.topk_weight.requires_grad()) root(layer.attended.topk_weight, weight);
    }
    root(layer.attended.rows, grad_rows);
    if (layer.aux.defined()) root(layer.aux, {});
    torch::autograd::backward(roots, grads);
    shards_of(layer.layer).after_backward(last_);
    return take_grad(layer.hidden);
  }

  // --- one chunk of one micro-batch ---

  Tensor forward_begin(Run& run) {
    const MicroBatch& batch = *run.batch;
    PITH_CHECK(batch.max_seqlen <= rotary_.cos.size(0) || !run.caches.empty(),
      "a document of {} tokens is longer than the {} positions prepared", batch.max_seqlen,
      rotary_.cos.size(0));
    if (hidden_link(run).from) return hidden_link(run).receive(batch.num_tokens());
    if (run.chunk == 1) return std::move(run_of(0, run.microbatch).handed_over);
    shards_.embedding.before_forward();
    run.embedded = model_.embed(batch.tokens);
    shards_.embedding.after_forward();
    return run.embedded;
  }

  template <class Objective>
  void forward_end(Run& run, const Tensor& hidden, const Objective& objective) {
    if (hidden_link(run).to) return hidden_link(run).send(hidden.detach());
    if (run.chunk == 0) {
      run.handed_over = hidden.detach();
      return;
    }
    const int64_t tokens = run.batch->num_tokens(), shared = shared_tokens(*run.batch);
    if (shared > 0) links_[4].send(hidden.detach().slice(0, tokens - shared));
    head(run, hidden.slice(0, 0, tokens - shared), 0, objective);
  }

  template <class Objective>
  void head(Run& run, const Tensor& hidden, int64_t first, const Objective& objective) {
    MicroBatch batch = *run.batch;
    for (Tensor* tensor: {&batch.tokens, &batch.labels, &batch.positions, &batch.row_id})
      *tensor = tensor->narrow(0, first, hidden.size(0));
    run.hidden = leaf(hidden);
    const bool grad = c10::GradMode::is_enabled(); // the loss adds the head's gradient at once
    grad ? shards_.head.before_backward() : shards_.head.before_forward();
    ObjectiveResult value = objective(model_.final_norm(run.hidden), model_.head_weight(), batch);
    grad ? shards_.head.after_backward() : shards_.head.after_forward();
    run.loss = value.loss;
    accumulate(result_.loss_sum, value.loss_sum);
    result_.per_token[index(run.microbatch)] = value.per_token;
  }
  Tensor head_backward(Run& run) {
    shards_.head.before_backward();
    backward_stage(exchange(run.loss, {}), {});
    shards_.head.after_backward(last_);
    return take_grad(exchange(run.hidden, {}));
  }

  // This stage's share of the first one's head.
  template <class Objective> void shared_head(Run& run, const Objective& objective) {
    const int64_t shared = shared_tokens(*run.batch);
    if (shared == 0) return;
    head(run, links_[4].receive(shared), run.batch->num_tokens() - shared, objective);
    links_[5].send(head_backward(run));
  }

  Tensor backward_begin(Run& run) {
    if (gradient_link(run).from) return gradient_link(run).receive(run.batch->num_tokens());
    if (run.chunk == 0) return std::move(run_of(1, run.microbatch).handed_over);
    const Tensor grad = head_backward(run);
    const int64_t shared = shared_tokens(*run.batch);
    return shared > 0 ? at::cat({grad, links_[5].receive(shared)}) : grad;
  }

  void backward_end(Run& run, const Tensor& grad) {
    if (gradient_link(run).to) return gradient_link(run).send(grad);
    if (run.chunk == 1) {
      run.handed_over = grad;
      return;
    }
    shards_.embedding.before_backward();
    backward_stage(exchange(run.embedded, {}), grad);
    shards_.embedding.after_backward(last_);
  }

  // Forward of one micro-batch against backward of another: while one waits for rows, the other
  // computes. `hidden` and `grad` move through as many layers as both have.
  void overlap(Run& forward, Tensor& hidden, Run& backward, Tensor& grad) {
    const size_t pairs = min(layers_of(forward).size(), backward.layers.size());
    for (size_t i = 0; i < pairs; ++i) {
      LayerRun& b = backward.layers.back();
      aggregate_backward(backward, b, grad); // gradients start for the experts
      LayerRun& f = attend(forward, layers_of(forward)[i], hidden);
      vector<WeightGradient> weights;
      {
        const DeferWeightGradients defer(weights);
        experts_backward(b); // and come back during what follows
      }
      dispatch(forward, f); // rows start for the experts
      for (const WeightGradient& job: weights) add_weight_gradient(job);
      experts(forward, f); // results come back during the next line
      grad = attend_backward(b);
      backward.layers.pop_back();
      hidden = aggregate(forward, f);
    }
  }

  // --- the schedule ---

  template <class Objective>
  void finish_forward(Run& run, Tensor hidden, const Objective& objective) {
    const bool grad = c10::GradMode::is_enabled();
    for (size_t i = grad ? run.layers.size() : 0; i < layers_of(run).size(); ++i) {
      LayerRun& layer = attend(run, layers_of(run)[i], hidden);
      dispatch(run, layer);
      experts(run, layer);
      hidden = aggregate(run, layer);
    }
    forward_end(run, hidden, objective);
  }

  void finish_backward(Run& run, Tensor grad) {
    while (!run.layers.empty()) {
      LayerRun& layer = run.layers.back();
      aggregate_backward(run, layer, grad);
      experts_backward(layer);
      grad = attend_backward(layer);
      run.layers.pop_back();
    }
    backward_end(run, grad);
  }

  template <class Objective> BatchResult execute(const vector<Action>& schedule,
    span<const MicroBatch> batches, const Objective& objective, span<LayerCache> caches,
    span<RoutingTape> tapes) {
    result_ = {};
    if (mesh_.place.pp <= 1) result_.per_token.resize(batches.size());
    for (const int chunk: {0, 1}) {
      auto& runs = runs_[index(chunk)];
      runs.clear();
      for (size_t i = 0; i < batches.size(); ++i)
        runs.push_back(
          {&batches[i], caches, tapes.empty() ? nullptr : &tapes[i], chunk, int64_t(i)});
    }
    for (RoutingTape& tape: tapes) {
      const auto layers = index(model_.config().num_layers);
      if (!tape.replay) tape.topk_idx.assign(layers, {}), tape.topk_weight.assign(layers, {});
    }
    for (const Action& action: schedule) {
      const Pass &first = action.front(), &pass = action.back();
      Run& run = run_of(pass.chunk, pass.microbatch);
      const bool goes_forward = first.kind == Pass::forward;
      const bool put_off = pass.kind == Pass::backward_input && defers_;
      const bool goes_back = pass.kind == Pass::backward || pass.kind == Pass::backward_input;
      last_ = pass.microbatch + 1 == ssize(batches) && !put_off;
      Run& ahead = run_of(first.chunk, first.microbatch);
      Tensor hidden, grad;
      if (goes_forward) hidden = forward_begin(ahead);
      if (goes_back) grad = backward_begin(run);
      if (pass.kind == Pass::head) shared_head(run, objective);
      if (goes_forward && goes_back) overlap(ahead, hidden, run, grad);
      optional<DeferWeightGradients> defer;
      if (put_off) defer.emplace(run.deferred);
      if (goes_back) finish_backward(run, grad);
      if (goes_forward) finish_forward(ahead, hidden, objective);
      if (pass.kind != Pass::weight) continue;
      for (const WeightGradient& job: run.deferred) add_weight_gradient(job);
      run.deferred.clear();
      if (last_ && defers_) // else the backward was last
        for (const int64_t layer: layers_of(run)) shards_of(layer).after_backward(true);
    }
    for (StageLink& link: links_) link.finish();
    for (auto& runs: runs_) runs.clear();
    return std::move(result_);
  }
};

template <DecoderModel Model> Pipeline<Model>::Pipeline(Model& model, const Mesh& mesh,
  int64_t positions, RouterTraining router, vector<int64_t> chunks, const ModelShards* shards,
  bool recompute) {
  const auto& config = model.config();
  if (chunks.empty()) chunks = {config.num_layers, 0};
  if (const Tensor& bias = config.router_state.bias; bias.defined()) {
    check_shape(bias, "router_state.bias", {config.num_layers, config.num_experts});
    router.state.bias = bias.to(mesh.device);
  }
  const auto dtype = model.parameter_units().front().front()->value.scalar_type();
  const bool resharded = shards && !shards->layers.empty() &&
    shards->layers.begin()->second.groups.front()->mode() == ShardMode::reshard;
  impl_.reset(new Impl{model, mesh, model.rotary(positions, mesh.device), router,
    layers_of_rank(chunks, mesh.shape.pp, mesh.place.pp),
    stage_links(mesh, config.hidden_size, dtype), shards ? *shards : ModelShards(), recompute,
    !resharded});
}

template <DecoderModel Model> RouterState& Pipeline<Model>::router_state() {
  return impl_->router_.state;
}

template <DecoderModel Model> void Pipeline<Model>::observe(StageObserver observer) {
  impl_->observer_ = std::move(observer);
}

template <DecoderModel Model> template <class Objective>
BatchResult Pipeline<Model>::forward_backward(
  span<const MicroBatch> batches, const Objective& objective, span<RoutingTape> tapes) {
  const Mesh& mesh = impl_->mesh_;
  const bool overlap = mesh.shape.pp > 1 || mesh.expert.size() > 1;
  const auto schedule =
    make_schedule(mesh.shape.pp, mesh.place.pp, ssize(batches), overlap, mesh.shape.head_share > 0);
  return impl_->execute(schedule, batches, objective, {}, tapes);
}

template <DecoderModel Model> template <class Objective>
BatchResult Pipeline<Model>::forward_only(span<const MicroBatch> batches,
  const Objective& objective, span<LayerCache> caches, span<RoutingTape> tapes) {
  PITH_CHECK(
    caches.empty() || impl_->mesh_.world.size() == 1, "generation runs in one process only");
  const c10::AutoGradMode no_grad(false);
  return impl_->execute(forward_schedule(ssize(batches)), batches, objective, caches, tapes);
}

#define PITH_OBJECTIVE(Model, Objective) \
  template BatchResult Pipeline<Model>::forward_only( \
    span<const MicroBatch>, const Objective&, span<LayerCache>, span<RoutingTape>)
#define PITH_FAMILY(Model) \
  template class Pipeline<Model>; \
  template BatchResult Pipeline<Model>::forward_backward( \
    span<const MicroBatch>, const NextTokenLoss&, span<RoutingTape>); \
  PITH_OBJECTIVE(Model, NextTokenLoss); \
  PITH_OBJECTIVE(Model, LastTokenLogits); \
  PITH_OBJECTIVE(Model, AllLogits)
PITH_FAMILY(Qwen3MoeModel);
PITH_FAMILY(DeepseekV2Model);
PITH_FAMILY(GptOssModel);
PITH_FAMILY(Qwen35MoeModel);
#undef PITH_FAMILY
#undef PITH_OBJECTIVE
}
