// Layout invariance, isolation of documents, ties, empty experts, decoding: the numbers of one
// process.
#include "engine/pipeline.h"
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include "tests/engine/tiny_model.h"

namespace pith {
namespace {
struct Outcome {
  double loss = 0, balance = 0, norm = 0;
  std::vector<Tensor> grads; // flat, one a group
  std::vector<Tensor> topk_idx; // one a MoE layer, all tokens in order
};

Outcome run(TinyModel& tiny, const std::vector<MicroBatch>& batches, double balance_loss) {
  auto pipeline = tiny.pipeline(balance_loss);
  zero_grads(tiny.groups);
  std::vector<RoutingTape> tapes(batches.size());
  const BatchResult result = pipeline.forward_backward(batches, NextTokenLoss(), tapes);
  Outcome out;
  out.loss = result.loss_sum.item<double>() / static_cast<double>(batches[0].global_trained_tokens);
  out.balance = result.balance_sum.item<double>();
  out.norm = grad_norm(tiny.groups, tiny.mesh).item<double>();
  for (const ShardGroup& group: tiny.groups) out.grads.push_back(group.grads.clone());
  for (size_t layer = 0; layer < tapes[0].topk_idx.size(); ++layer) {
    if (!tapes[0].topk_idx[layer].defined()) continue;
    std::vector<Tensor> parts;
    for (const RoutingTape& tape: tapes) parts.push_back(tape.topk_idx[layer]);
    out.topk_idx.push_back(at::cat(parts));
  }
  return out;
}

TEST(Pipeline, MicroBatchAndAccumulationDoNotChangeNumbers) {
  TinyModel tiny;
  const std::vector<Row> rows = ragged_rows(8, 48, 61);
  const Outcome whole = run(tiny, cut(rows, 8), 0.1);
  EXPECT_GT(whole.norm, 0);
  for (const int64_t micro_batch: {4, 2, 1}) {
    const Outcome parts = run(tiny, cut(rows, micro_batch), 0.1);
    ASSERT_EQ(parts.topk_idx.size(), whole.topk_idx.size());
    for (size_t i = 0; i < parts.topk_idx.size(); ++i)
      ASSERT_TRUE(at::equal(parts.topk_idx[i], whole.topk_idx[i]))
        << "routes, micro-batch " << micro_batch;
    EXPECT_NEAR(parts.loss, whole.loss, 1e-6 * whole.loss);
    EXPECT_NEAR(parts.balance, whole.balance, 1e-6 * whole.balance);
    EXPECT_NEAR(parts.norm, whole.norm, 1e-6 * whole.norm);
    for (size_t i = 0; i < parts.grads.size(); ++i)
      EXPECT_LT(relative_error(parts.grads[i], whole.grads[i]), 1e-6) << "group " << i;
  }
}

// Unequal counts of trained tokens in the micro-batches: the mean is over tokens, not over
// micro-batches.
TEST(Pipeline, LossIsDividedOnceByAllTrainedTokens) {
  TinyModel tiny;
  std::vector<Row> rows = ragged_rows(2, 32, 61);
  for (size_t t = 0; t + 1 < rows[0].labels.size(); ++t) rows[0].labels[t] = -100;
  rows[0].labels[0] = 5;
  rows[0].labels.back() = -100;
  const Outcome whole = run(tiny, cut(rows, 2), 0), parts = run(tiny, cut(rows, 1), 0);
  EXPECT_NEAR(parts.loss, whole.loss, 1e-6 * whole.loss);
  EXPECT_NEAR(parts.norm, whole.norm, 1e-6 * whole.norm);
}

TEST(Pipeline, BatchWithoutTrainedTokensHasNoLossAndNoGradient) {
  TinyModel tiny;
  std::vector<Row> rows = ragged_rows(1, 16, 61);
  for (int64_t& label: rows[0].labels) label = -100;
  auto pipeline = tiny.pipeline();
  zero_grads(tiny.groups);
  const BatchResult result = pipeline.forward_backward(cut(rows, 1), NextTokenLoss());
  EXPECT_EQ(result.loss_sum.item<double>(), 0);
  EXPECT_EQ(grad_norm(tiny.groups, tiny.mesh).item<double>(), 0);
}

TEST(Pipeline, DocumentsOfARowDoNotSeeEachOther) {
  TinyModel tiny;
  std::vector<Row> rows = ragged_rows(1, 40, 61);
  rows[0].document_begins = {0, 20};
  for (int64_t t = 0; t < 40; ++t) rows[0].positions[static_cast<size_t>(t)] = t % 20;
  auto pipeline = tiny.pipeline();
  const Tensor before = pipeline.forward_only(cut(rows, 1), AllLogits()).per_token[0];
  rows[0].tokens[3] = (rows[0].tokens[3] + 1) % 61;
  const Tensor after = pipeline.forward_only(cut(rows, 1), AllLogits()).per_token[0];
  // Not bit-equal: an expert that lost or won a row may sum its other rows in another blocking.
  for (int64_t t = 0; t < 40; ++t) {
    if (t < 3 || t >= 20) EXPECT_LT(relative_error(after[t], before[t]), 1e-5) << "position " << t;
    else EXPECT_GT(relative_error(after[t], before[t]), 1e-3) << "position " << t;
  }
}

// Router weights of zero: all scores are equal, every token takes the experts with the lowest ids,
// each time; the others' gradients are exactly zero.
TEST(Pipeline, TiesGoToTheLowestExpertsAndUnusedExpertsHaveNoGradient) {
  TinyModel tiny;
  for (Parameter* parameter: all_parameters(tiny.groups))
    if (parameter->group == ParameterGroup::router) parameter->value.detach().zero_();
  const auto batches = cut(ragged_rows(2, 24, 61), 1);
  for (int repeat = 0; repeat < 20; ++repeat) {
    const Outcome out = run(tiny, batches, 0);
    for (const Tensor& idx: out.topk_idx) {
      EXPECT_TRUE(idx.select(1, 0).eq(0).all().item<bool>());
      EXPECT_TRUE(idx.select(1, 1).eq(1).all().item<bool>());
    }
  }
  for (Parameter* parameter: all_parameters(tiny.groups)) {
    if (parameter->group != ParameterGroup::expert) continue;
    EXPECT_GT(parameter->grad.narrow(0, 0, 2).abs().max().item<double>(), 0) << parameter->name;
    EXPECT_EQ(parameter->grad.narrow(0, 2, 4).abs().max().item<double>(), 0) << parameter->name;
  }
}

TEST(Pipeline, ForwardOnlyTouchesNoGradient) {
  TinyModel tiny;
  zero_grads(tiny.groups);
  auto pipeline = tiny.pipeline(0.1);
  pipeline.forward_only(cut(ragged_rows(2, 24, 61), 1), NextTokenLoss());
  for (const ShardGroup& group: tiny.groups) EXPECT_EQ(group.grads.abs().max().item<double>(), 0);
}

// Two sequences of unequal length, token by token through the cache, against the whole at once.
template <class Model> void check_unequal_decoding(const nlohmann::json& config) {
  TinyModelOf<Model> tiny(config);
  auto pipeline = tiny.pipeline();
  std::vector<Row> rows = ragged_rows(2, 12, 61);
  for (Row& row: rows) {
    row.document_begins = {0};
    for (size_t t = 0; t < row.positions.size(); ++t) row.positions[t] = static_cast<int64_t>(t);
  }
  const auto part = [&](const Row& row, size_t begin, size_t end) {
    Row out;
    out.document_begins = {0};
    for (size_t t = begin; t < end; ++t) {
      out.tokens.push_back(row.tokens[t]);
      out.labels.push_back(-100);
      out.positions.push_back(static_cast<int64_t>(t));
    }
    return out;
  };
  std::vector<LayerCache> caches(3);
  size_t done_a = 0, done_b = 0;
  for (const auto& [a, b]: {std::pair<size_t, size_t>{5, 3}, {6, 4}, {7, 5}, {9, 6}, {12, 7}}) {
    const std::vector<Row> fresh{part(rows[0], done_a, a), part(rows[1], done_b, b)};
    const std::vector<Row> all{part(rows[0], 0, a), part(rows[1], 0, b)};
    const Tensor cached =
      pipeline.forward_only(cut(fresh, 2), LastTokenLogits(), caches).per_token[0];
    const Tensor full = pipeline.forward_only(cut(all, 2), LastTokenLogits()).per_token[0];
    EXPECT_LT(relative_error(cached, full), 1e-5) << "after " << a << " and " << b << " tokens";
    EXPECT_TRUE(at::equal(cached.argmax(1), full.argmax(1)));
    done_a = a;
    done_b = b;
  }
}

TEST(Pipeline, DecodingThroughTheCacheEqualsTheFullForward) {
  check_unequal_decoding<Qwen3MoeModel>(tiny_config());
  check_unequal_decoding<DeepseekV2Model>(tiny_deepseek_config());
  check_unequal_decoding<GptOssModel>(tiny_gpt_oss_config());
  check_unequal_decoding<Qwen35MoeModel>(tiny_qwen35_config());
}

// Padding at the end of rows is in no family's balance loss, whatever its tokens are.
template <class Model> void check_padding(const nlohmann::json& config) {
  TinyModelOf<Model> tiny(config);
  auto pipeline = tiny.pipeline();
  const auto balance = [&](int64_t padding, int64_t token) {
    std::vector<Row> rows = ragged_rows(2, 24, 61);
    for (Row& row: rows) {
      row.padding = padding;
      row.document_begins = {0, 16};
      for (size_t t = 0; t < 24; ++t) {
        row.positions[t] = static_cast<int64_t>(t % 16);
        if (t >= 15) row.labels[t] = -100;
        if (t >= 16) row.tokens[t] = token;
      }
    }
    return pipeline.forward_only(cut(rows, 2), NextTokenLoss()).balance_sum.template item<double>();
  };
  EXPECT_NEAR(balance(8, 3), balance(8, 44), 1e-6);
  EXPECT_GT(std::abs(balance(0, 3) - balance(0, 44)), 1e-3);
}

// z-loss: c / N sum over tokens of lse^2, so 2 c / N sum of lse softmax x^T in the router's weight.
// Balancing by bias moves choices, not weights; what is recorded is what was chosen.
TEST(Pipeline, ZLossAndBiasOfTheRouter) {
  TinyModel tiny;
  const std::vector<MicroBatch> batches = cut(ragged_rows(2, 24, 61), 2);
  const int64_t last = tiny.model.config().num_layers - 1;
  const std::string name = fmt::format("model.layers.{}.mlp.gate.weight", last);
  Tensor rows;
  const auto gradient = [&](double z_loss, const Tensor& bias, RoutingTape& tape) {
    Pipeline<Qwen3MoeModel> pipeline(
      tiny.model, tiny.mesh, 64, {.z_loss = z_loss, .state = {bias, {}}});
    pipeline.observe([&](const std::string& stage, const Tensor& value) {
      if (stage == fmt::format("model.layers.{}.attend.rows", last)) rows = value.clone();
    });
    zero_grads(tiny.groups);
    std::vector<RoutingTape> tapes(1);
    const BatchResult result = pipeline.forward_backward(batches, NextTokenLoss(), tapes);
    tape = tapes[0];
    for (size_t layer = 0; layer < tape.topk_idx.size(); ++layer) {
      const Tensor& idx = tape.topk_idx[layer];
      if (!idx.defined()) continue;
      EXPECT_TRUE(
        at::equal(result.expert_counts[static_cast<int64_t>(layer)], idx.view(-1).bincount({}, 6)));
    }
    for (const Parameter* p: all_parameters(tiny.groups))
      if (p->name == name) return std::pair(p->value.detach().clone(), p->grad.clone());
    throw std::runtime_error(name);
  };
  RoutingTape plain, same, moved;
  const auto [weight, without] = gradient(0, {}, plain);
  const auto [again, with] = gradient(0.5, {}, same);
  const Tensor logits = at::matmul(rows, weight.t());
  const Tensor factor = logits.logsumexp(1, true) * logits.softmax(1) *
    (2 * 0.5 / static_cast<double>(batches[0].global_trained_tokens));
  EXPECT_LT(relative_error(with - without, at::matmul(factor.t(), rows)), 1e-5);

  const Tensor bias = at::zeros({last + 1, 6});
  bias.select(1, 5).fill_(1); // probabilities differ by less
  gradient(0, bias, moved);
  const auto at_last = static_cast<size_t>(last);
  EXPECT_TRUE(moved.topk_idx[at_last].eq(5).any(1).all().item<bool>());
  EXPECT_FALSE(plain.topk_idx[at_last].eq(5).any(1).all().item<bool>());
  EXPECT_NEAR(moved.topk_weight[at_last].sum(1).max().item<double>(), 1, 1e-5); // no bias in it
}

TEST(Pipeline, PaddingIsInNoBalanceLoss) {
  check_padding<Qwen3MoeModel>(tiny_config());
  check_padding<DeepseekV2Model>(tiny_deepseek_config());
  check_padding<GptOssModel>(tiny_gpt_oss_config());
  check_padding<Qwen35MoeModel>(tiny_qwen35_config());
}

TEST(Pipeline, ADocumentLongerThanTheRotaryTableIsRefused) {
  TinyModel tiny;
  auto pipeline = tiny.pipeline(0, 8);
  EXPECT_THROW(pipeline.forward_only(cut(ragged_rows(1, 200, 61), 1), NextTokenLoss()), Error);
}

} // namespace
} // namespace pith
