// The contract between a model family and the engine, checked by the compiler.
//
// For each layer and micro-batch:
//   1 attend     norm, attention, norm, router                       (model)
//   2 dispatch   rows and routing weights travel to their experts    (engine)
//     shared     what needs no dispatch: shared experts, dense MLP   (model, meanwhile)
//   3 experts    expert computation, weighted sum per row in FP32    (model)
//   4 combine    one row per (token, rank) travels back              (engine)
//   5 aggregate  plain sum: returned + shared + residual             (model)
// Autograd works inside a stage; the engine joins them by detaching.
#pragma once
#include "core/mesh.h"
#include "core/microbatch.h"
#include "core/parameter.h"
#include "operators/delta_net.h"
#include "operators/kv_cache.h"
#include "operators/permute.h"
#include "operators/ring_attention.h"
#include "operators/rotary.h"
#include "operators/router.h"

namespace pith {
// What generation keeps of one layer.
struct LayerCache {
  KvCache kv;
  DeltaCache delta;
};

// One micro-batch's routes, a layer an entry (undefined in dense layers).
struct RoutingTape {
  bool replay = false; // take topk_idx from here
  vector<Tensor> topk_idx, topk_weight; // (T, K) int64, float32
};

// What balancing carries from step to step, one row a layer; in config.json as "router_state".
struct RouterState {
  Tensor bias; // (layers, E) float32: added in the choice (Wang et al., 2408.15664)
  Tensor shares; // (layers, E) float64: of the last step's choices. Both: or undefined
};

struct RouterTraining {
  double balance_loss = 0; // its coefficient; 0: only measured
  bool force_balance = false; // balanced_routes() instead of the router
  BalanceKind kind = BalanceKind::sequence;
  double z_loss = 0; // times the mean of logsumexp(logits)^2 (Zoph et al., 2202.08906)
  RouterState state = {};
};

struct LayerContext {
  const MicroBatch& batch;
  const Mesh& mesh;
  const RotaryTable& rotary;
  const RouterTraining& router;
  int64_t layer; // index in the whole model
  LayerCache* cache; // this layer's in generation, else null
  RoutingTape* tape; // records or replays routes, or null
};

inline AttentionSpan span_of(const MicroBatch& batch) {
  return {batch.cu_seqlens, batch.cu_seqlens, batch.cu_seqlens_host, batch.cu_seqlens_host,
    batch.max_seqlen, batch.max_seqlen};
}

// attention() inside documents, over context-parallel ranks or with the cache's earlier keys.
inline Tensor attend_documents(const LayerContext& context, const Tensor& q, const Tensor& k,
  const Tensor& v, double scale, const AttentionOptions& options = {}) {
  const MicroBatch& batch = context.batch;
  if (context.mesh.context.size() > 1) {
    PITH_CHECK(context.cache == nullptr,
      "generating with a cache of keys is not possible with "
      "context parallelism ({} ranks)",
      context.mesh.context.size());
    if (options.window > 0)
      return window_attention(q, k, v, batch.halo, scale, options, context.mesh.context);
    return ring_attention(q, k, v, batch.ring, scale, context.mesh.context, options.sinks);
  }
  if (context.cache == nullptr) return attention(q, k, v, span_of(batch), scale, options);
  KvCache& all = context.cache->kv;
  const AttentionSpan span = append_to_cache(all, k, v, span_of(batch));
  return attention(q, all.k, all.v, span, scale, options);
}

struct Attended {
  Tensor rows; // (T, H) for experts and shared()
  Tensor residual; // (T, H)
  Tensor topk_idx; // (T, K) int64; undefined in a dense layer
  Tensor topk_weight; // (T, K) float32; undefined in a dense layer
  function<RouterBalance()> balance; // empty in a dense layer
  Tensor z_sum; // scalar float32, of logsumexp(logits)^2, or undefined
};

struct ModelPart {
  vector<int64_t> layers; // indices in the whole model, ascending
  bool embedding = true, head = true;
  int64_t expert_begin, expert_end; // of every MoE layer

  size_t place_of(int64_t layer) const {
    const auto at = ranges::lower_bound(layers, layer);
    PITH_CHECK(at != layers.end() && *at == layer, "layer {} is not on this process", layer);
    return index(at - layers.begin());
  }
};

struct ModelConfig {
  int64_t vocab_size, hidden_size, num_layers, num_heads, max_positions;
  int64_t num_kv_heads = 0, head_dim = 0; // grouped-query attention
  int64_t num_experts, experts_per_token, moe_intermediate_size;
  int64_t intermediate_size; // of dense layers
  double rms_norm_eps, rope_theta;
  int64_t rotary_dim; // of a head, or of its turned part
  Yarn yarn = {}; // of families that have it
  bool zero_centred = false; // norms multiply by 1 + weight
  bool tie_embeddings;
  int64_t window = 0; // of layers that have one, the token included
  string prefix = "model."; // of names on disk but lm_head.weight
  string source_json; // as read: nothing is lost on export
  RouterState router_state;

  void cut_layers(int64_t layers); // keeps the first
  string generation_json() const; // of a checkpoint
};

// Stage 5 of all families so far.
inline Tensor sum_of_parts(
  const LayerContext&, const Tensor& returned, const Attended& attended, const Tensor& shared) {
  Tensor hidden = attended.residual;
  if (returned.defined()) hidden = hidden + returned;
  if (shared.defined()) hidden = hidden + shared;
  return hidden;
}

template <class Layer>
concept DecoderLayer = requires(Layer& layer, const LayerContext& context, const Tensor& tensor,
  const Attended& attended, const ExpertPlan& plan) {
  // hidden (T, H)
  { layer.attend(context, tensor) } -> same_as<Attended>;
  // (T, H), or undefined where there is none
  { layer.shared(context, attended) } -> same_as<Tensor>;
  // rows (R, H), row_weight (R, K) float32, plan over local experts -> (R, H) weighted sums
  { layer.experts(context, tensor, tensor, plan) } -> same_as<Tensor>;
  // returned (T, H) or undefined, attended, shared (T, H) or undefined -> hidden (T, H)
  { layer.aggregate(context, tensor, attended, tensor) } -> same_as<Tensor>;
};

// For --dry-run, inspect and MFU.
struct ModelSize {
  int64_t parameters = 0; // tied ones once
  int64_t active_parameters = 0; // that one token passes
  // Of a token, forward and backward: 6 per matrix weight (no embedding), causal half of attention.
  double flops_per_token = 0;
  // Elements in compute dtype that a token keeps for the backward pass, all layers.
  int64_t activations_per_token = 0;
  // Delta rule in LibTorch, a token: bytes for a moment, seconds of all layers on one H200.
  double scratch_per_token = 0, slow_seconds_per_token = 0;
};

template <class Model>
concept DecoderModel = requires(Model& model, const Model& constant, const Tensor& tensor,
  int64_t i, const typename Model::Config& config, const ModelPart& part, Device device) {
  requires DecoderLayer<typename Model::Layer>;
  requires std::derived_from<typename Model::Config, ModelConfig>;
  requires std::constructible_from<Model, typename Model::Config, ModelPart>;
  { constant.config() } -> same_as<const typename Model::Config&>;
  // tokens (T) -> hidden (T, H)
  { model.embed(tensor) } -> same_as<Tensor>;
  { model.layer(i) } -> same_as<typename Model::Layer&>; // i: in the whole model
  // hidden (T, H) -> (T, H): the last norm; objectives multiply by the head's weight
  { model.final_norm(tensor) } -> same_as<Tensor>;
  { model.head_weight() } -> same_as<Parameter&>; // (V, H)
  { constant.rotary(i, device) } -> same_as<RotaryTable>; // i: positions
  // One list a unit of sharding (embedding, each layer, head), in forward order.
  { model.parameter_units() } -> same_as<vector<vector<Parameter*>>>;
  { Model::Config::parse_file(fs::path()) } -> same_as<typename Model::Config>;
  { config.to_json(kBFloat16) } -> same_as<string>; // of a checkpoint
  { config.size(i) } -> same_as<ModelSize>; // i: sequence length
};

inline ModelPart whole_model(int64_t num_layers, int64_t num_experts) {
  ModelPart part{{}, true, true, 0, num_experts};
  for (int64_t layer = 0; layer < num_layers; ++layer) part.layers.push_back(layer);
  return part;
}
}
