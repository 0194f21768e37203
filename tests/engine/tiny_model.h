// Tiny models with buffers of its own, for tests of the engine.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include "engine/batches.h"
#include "engine/checkpoint.h"
#include "engine/optimizer.h"
#include "engine/pipeline.h"
#include "models/deepseek_v2.h"
#include "models/gpt_oss.h"
#include "models/qwen3_5_moe.h"
#include "models/qwen3_moe.h"

namespace pith {
inline nlohmann::json tiny_config() {
  return {{"model_type", "qwen3_moe"}, {"vocab_size", 61}, {"hidden_size", 32},
    {"num_hidden_layers", 3}, {"num_attention_heads", 4}, {"num_key_value_heads", 2},
    {"head_dim", 8}, {"num_experts", 6}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", 24},
    {"intermediate_size", 40}, {"mlp_only_layers", {1}}, {"norm_topk_prob", true},
    {"tie_word_embeddings", false}, {"rms_norm_eps", 1e-6}, {"rope_theta", 10000.0},
    {"max_position_embeddings", 512}, {"eos_token_id", 60}};
}

inline nlohmann::json tiny_deepseek_config() {
  return {{"model_type", "deepseek_v2"}, {"vocab_size", 61}, {"hidden_size", 32},
    {"num_hidden_layers", 3}, {"first_k_dense_replace", 1}, {"num_attention_heads", 4},
    {"q_lora_rank", 20}, {"kv_lora_rank", 16}, {"qk_nope_head_dim", 8}, {"qk_rope_head_dim", 4},
    {"v_head_dim", 10}, {"n_routed_experts", 8}, {"num_experts_per_tok", 2},
    {"n_shared_experts", 1}, {"n_group", 4}, {"topk_group", 2},
    {"topk_method", "group_limited_greedy"}, {"routed_scaling_factor", 1.5},
    {"moe_intermediate_size", 24}, {"intermediate_size", 40}, {"rms_norm_eps", 1e-6},
    {"rope_theta", 10000.0}, {"max_position_embeddings", 512}, {"eos_token_id", 60},
    {"rope_scaling",
      {{"type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 16}, {"mscale", 1.0},
        {"mscale_all_dim", 0.5}}}};
}

// Windows shorter than most documents, in two of three layers.
inline nlohmann::json tiny_gpt_oss_config() {
  return {{"model_type", "gpt_oss"}, {"vocab_size", 61}, {"hidden_size", 32},
    {"num_hidden_layers", 3}, {"num_attention_heads", 4}, {"num_key_value_heads", 2},
    {"head_dim", 8}, {"num_local_experts", 8}, {"num_experts_per_tok", 2},
    {"intermediate_size", 24}, {"sliding_window", 5}, {"swiglu_limit", 1.5}, {"rms_norm_eps", 1e-5},
    {"rope_theta", 10000.0}, {"max_position_embeddings", 512}, {"eos_token_id", 60},
    {"rope_scaling",
      {{"rope_type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 16},
        {"truncate", false}}}};
}

// Two delta nets, then attention. Documents are shorter and longer than the convolution.
inline nlohmann::json tiny_qwen35_config() {
  return {{"model_type", "qwen3_5_moe_text"}, {"vocab_size", 61}, {"hidden_size", 32},
    {"num_hidden_layers", 3}, {"full_attention_interval", 3}, {"num_attention_heads", 4},
    {"num_key_value_heads", 2}, {"head_dim", 8}, {"num_experts", 8}, {"num_experts_per_tok", 2},
    {"moe_intermediate_size", 24}, {"shared_expert_intermediate_size", 20},
    {"linear_num_key_heads", 2}, {"linear_num_value_heads", 4}, {"linear_key_head_dim", 8},
    {"linear_value_head_dim", 6}, {"rms_norm_eps", 1e-5}, {"max_position_embeddings", 512},
    {"eos_token_id", 60},
    {"rope_parameters",
      {{"rope_type", "default"}, {"rope_theta", 10000.0}, {"partial_rotary_factor", 0.5},
        {"mrope_section", {1, 1, 0}}}}};
}

inline Mesh mesh_of_one(at::Device device) {
  Mesh mesh;
  mesh.device = device;
  return mesh;
}

template <DecoderModel Model> struct TinyModelOf {
  using Config = typename Model::Config;

  Mesh mesh;
  Model model;
  std::vector<ShardGroup> groups;

  explicit TinyModelOf(const nlohmann::json& json = tiny_config(),
    at::ScalarType dtype = at::kFloat, at::Device device = at::kCPU, double init_std = 0.1)
      : TinyModelOf(Config::parse(json, "test"), dtype, device, init_std) {}

  TinyModelOf(const Config& config, at::ScalarType dtype, at::Device device, double init_std)
      : mesh(mesh_of_one(device)),
        model(config, whole_model(config.num_layers, config.num_experts)),
        groups(make_shard_groups(model.parameter_units(), dtype, mesh, ShardGroup::Use::training)) {
    for (ShardGroup& group: groups) group.initialize(7, init_std, config.num_layers);
  }

  Pipeline<Model> pipeline(double balance_loss = 0, int64_t positions = 512) {
    return Pipeline<Model>(model, mesh, positions, {balance_loss, false});
  }
};
using TinyModel = TinyModelOf<Qwen3MoeModel>;

// Rows of ragged documents from a fixed pattern; labels stop at documents.
inline std::vector<Row> ragged_rows(
  int64_t count, int64_t length, int64_t vocab, uint64_t state = 12345) {
  std::vector<Row> rows(static_cast<size_t>(count));
  const auto next = [&] {
    return state = state * 6364136223846793005u + 1442695040888963407u, state >> 33;
  };
  for (Row& row: rows) {
    int64_t left = 0;
    for (int64_t t = 0; t < length; ++t) {
      if (left == 0) {
        left = std::min<int64_t>(length - t, 1 + static_cast<int64_t>(next() % 17));
        row.document_begins.push_back(t);
      }
      row.tokens.push_back(static_cast<int64_t>(next() % static_cast<uint64_t>(vocab)));
      row.positions.push_back(t - row.document_begins.back());
      --left;
    }
    for (int64_t t = 0; t < length; ++t) {
      const bool last = t + 1 == length || row.positions[static_cast<size_t>(t + 1)] == 0;
      row.labels.push_back(last ? -100 : row.tokens[static_cast<size_t>(t + 1)]);
    }
  }
  return rows;
}

inline std::vector<MicroBatch> cut(
  const std::vector<Row>& rows, int64_t micro_batch, at::Device device = at::kCPU) {
  int64_t trained = 0;
  for (const Row& row: rows) trained += row.trained_tokens();
  std::vector<MicroBatch> batches;
  for (size_t i = 0; i < rows.size(); i += static_cast<size_t>(micro_batch)) {
    const std::vector<Row> part(
      rows.begin() + static_cast<int64_t>(i), rows.begin() + static_cast<int64_t>(i) + micro_batch);
    batches.push_back(
      make_microbatch(part, true, trained, static_cast<int64_t>(rows.size()), device));
  }
  return batches;
}

// |a - b| / |b| in the Euclidean norm, FP64; |a| where b is zero.
inline double relative_error(const Tensor& a, const Tensor& b) {
  const Tensor x = a.detach().to(at::kCPU, at::kDouble), y = b.detach().to(at::kCPU, at::kDouble);
  const double norm = y.norm().item<double>();
  const double error = (x - y).norm().item<double>();
  return norm > 0 ? error / norm : error;
}

} // namespace pith
