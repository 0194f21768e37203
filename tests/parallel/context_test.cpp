// Context parallelism: the split, ring attention, the balance loss and a whole model against one
// process.
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index_select.h>
#include <gmock/gmock.h>
#include "core/mesh.h"
#include "engine/batches.h"
#include "operators/delta_net.h"
#include "operators/ring_attention.h"
#include "operators/router.h"
#include "tests/allocate.h"
#include "tests/engine/tiny_model.h"
#include "tests/operators/error_text.h"
#include "tests/operators/gradient_check.h"
#include "tests/operators/values.h"
#include "tests/parallel/world.h"

namespace pith::test {
namespace {
using Begins = std::vector<int64_t>;

// Rows of `length` tokens whose documents begin at these places. The tokens are numbered through,
// each token's label is the next.
MicroBatch whole_batch(int64_t length, const std::vector<Begins>& documents) {
  std::vector<Row> rows;
  for (const Begins& begins: documents) {
    Row row;
    row.document_begins = begins;
    size_t next = 0;
    for (int64_t t = 0; t < length; ++t) {
      if (next < begins.size() && begins[next] == t) ++next;
      row.tokens.push_back(std::ssize(rows) * length + t);
      row.labels.push_back(row.tokens.back() + 1);
      row.positions.push_back(t - begins[next - 1]);
    }
    rows.push_back(row);
  }
  const int64_t count = std::ssize(rows);
  return make_microbatch(rows, true, count * length, count, at::kCPU);
}

// Known fault 17: 16 tokens over 2 ranks.
TEST(Context, LabelsAndPositionsAreThoseOfTheUnsplitRow) {
  const MicroBatch whole = whole_batch(16, {{0, 6}, {0}});
  const MicroBatch low = split_context(whole, 0, 2, at::kCPU);
  EXPECT_THAT(list<int64_t>(low.tokens),
    testing::ElementsAre(0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 28, 29, 30, 31));
  EXPECT_THAT(list<int64_t>(low.labels),
    testing::ElementsAre(1, 2, 3, 4, 13, 14, 15, 16, 17, 18, 19, 20, 29, 30, 31, 32));
  EXPECT_THAT(list<int32_t>(low.positions),
    testing::ElementsAre(0, 1, 2, 3, 6, 7, 8, 9, 0, 1, 2, 3, 12, 13, 14, 15));
  EXPECT_EQ(low.trained_tokens, 16);
  EXPECT_EQ(low.global_trained_tokens, 32);
  EXPECT_EQ(low.max_seqlen, 16);
  EXPECT_TRUE(at::equal(low.cu_seqlens, whole.cu_seqlens));
  EXPECT_THAT(list<int64_t>(split_context(whole, 1, 2, at::kCPU).tokens.narrow(0, 0, 8)),
    testing::ElementsAre(4, 5, 6, 7, 8, 9, 10, 11));
}

TEST(Context, EveryTokenIsOnOneRank) {
  const MicroBatch whole = whole_batch(24, {{0, 3, 4}, {0}, {0, 23}});
  std::vector<Tensor> parts;
  int64_t trained = 0;
  for (int64_t rank = 0; rank < 3; ++rank) {
    const MicroBatch part = split_context(whole, rank, 3, at::kCPU);
    parts.push_back(part.tokens);
    trained += part.trained_tokens;
  }
  EXPECT_TRUE(at::equal(std::get<0>(at::cat(parts).sort()), whole.tokens));
  EXPECT_EQ(trained, whole.trained_tokens);
}

// Known fault 16: a clear refusal that names the multiple.
TEST(Context, RowsThatCannotBeCutAreRefused) {
  const MicroBatch whole = whole_batch(10, {{0, 4}, {0}});
  EXPECT_THAT(error_text([&] { split_context(whole, 0, 2, at::kCPU); }),
    testing::AllOf(testing::HasSubstr("row 0 has 10 tokens"), testing::HasSubstr("multiple of 4")));
  const MicroBatch part = split_context(whole_batch(8, {{0}}), 0, 2, at::kCPU);
  EXPECT_THAT(
    error_text([&] { split_context(part, 0, 2, at::kCPU); }), testing::HasSubstr("unsplit"));
  const Tensor q = at::zeros({4, 2, 4});
  EXPECT_THAT(error_text([&] { ring_attention(q, q, q, part.ring, 1, Comm()); }),
    testing::HasSubstr("split for 4 tokens on 2 ranks"));
}

struct Case {
  const char* name;
  int64_t length;
  std::vector<Begins> documents;
  int64_t heads, kv_heads, dim;
  int64_t v_dim = dim;
};

const Begins kOneToken = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
const Case kCases[] = {
  {"one long document", 32, {{0}}, 4, 2, 8},
  {"two rows, one document each", 16, {{0}, {0}}, 2, 2, 4},
  {"border on a chunk border, C = 2 and 4", 32, {{0, 8, 16}}, 4, 1, 4},
  {"next to a chunk border", 32, {{0, 7, 17}, {0, 9, 15, 25}}, 6, 3, 5},
  {"ragged rows", 48, {{0, 1, 7, 30}, {0, 24, 25}, {0, 47}}, 4, 2, 6},
  {"documents of one token", 16, {kOneToken, {0, 15}}, 4, 4, 4},
  {"values narrower than keys", 48, {{0, 1, 7, 30}, {0}, {0, 47}}, 3, 3, 6, 4},
};

// The layouts of this run: CP of 2, and of 4 where there are so many processes.
std::vector<Mesh> meshes() {
  std::vector<Mesh> result;
  for (const int64_t cp: {2, 4})
    if (world().size() % cp == 0) result.push_back(make_mesh({.cp = cp}, world(), device()));
  return result;
}

MicroBatch split(const MicroBatch& whole, const Mesh& mesh) {
  return split_context(whole, mesh.context.rank(), mesh.context.size(), device());
}

// Sinks, windows, documents and ranks together against attention() on the whole rows.
TEST(Context, SinksAndWindowsEqualAttention) {
  for (const Mesh& mesh: meshes()) {
    for (const Case& c: kCases) {
      for (const int64_t window: {0, 1, 3, 7, 200}) {
        const MicroBatch whole = whole_batch(c.length, c.documents);
        const MicroBatch part =
          split_context(whole, mesh.context.rank(), mesh.context.size(), device(), window);
        const Tensor mine = part.tokens.cpu();
        const int64_t tokens = whole.num_tokens();
        Parameter sinks("sinks", {c.heads}, ParameterGroup::bias, Init::normal);
        allocate(sinks, at::kDouble, at::kCPU);
        sinks.value.detach().copy_(random_tensor("sinks", {c.heads}));
        std::vector<Tensor> x{random_tensor("q", {tokens, c.heads, c.dim}),
          random_tensor("k", {tokens, c.kv_heads, c.dim}),
          random_tensor("v", {tokens, c.kv_heads, c.v_dim})};
        const Tensor cotangent = random_tensor("cotangent", {tokens, c.heads, c.v_dim});
        for (Tensor& t: x) t.set_requires_grad(true);
        const Tensor expected =
          attention(x[0], x[1], x[2], span_of(whole), 0.3, {.window = window, .sinks = &sinks});
        expected.backward(cotangent);
        const Tensor sink_gradient = sinks.grad.clone();
        for (const at::ScalarType dtype: {at::kDouble, at::kBFloat16}) {
          SCOPED_TRACE(fmt::format(
            "CP {}, {}, window {}, {}", mesh.context.size(), c.name, window, dtype_name(dtype)));
          std::vector<Tensor> local;
          for (const Tensor& t: x)
            local.push_back(
              t.detach().index_select(0, mine).to(device(), dtype).set_requires_grad(true));
          Parameter copy("sinks", {c.heads}, ParameterGroup::bias, Init::normal);
          allocate(copy, dtype, device());
          copy.value.detach().copy_(sinks.value.detach());
          const Tensor out = window == 0
            ? ring_attention(local[0], local[1], local[2], part.ring, 0.3, mesh.context, &copy)
            : window_attention(local[0], local[1], local[2], part.halo, 0.3,
                {.window = window, .sinks = &copy}, mesh.context);
          out.backward(cotangent.index_select(0, mine).to(device(), dtype));
          mesh.context.all_reduce(copy.grad);
          const double tolerance = dtype == at::kDouble ? 1e-10 : 0.05;
          EXPECT_LE(relative_error(out, expected.index_select(0, mine)), tolerance);
          for (size_t i = 0; i < 3; ++i)
            EXPECT_LE(relative_error(local[i].grad(), x[i].grad().index_select(0, mine)), tolerance)
              << "gradient " << i;
          EXPECT_LE(relative_error(copy.grad, sink_gradient), tolerance);
        }
      }
    }
  }
}

// Forward and every gradient against attention() on the whole rows, in FP64.
TEST(Context, RingAttentionEqualsAttention) {
  for (const Mesh& mesh: meshes()) {
    for (const Case& c: kCases) {
      const MicroBatch whole = whole_batch(c.length, c.documents), part = split(whole, mesh);
      const Tensor mine = part.tokens.cpu();
      const int64_t tokens = whole.num_tokens();
      std::vector<Tensor> x{random_tensor("q", {tokens, c.heads, c.dim}),
        random_tensor("k", {tokens, c.kv_heads, c.dim}),
        random_tensor("v", {tokens, c.kv_heads, c.v_dim})};
      const Tensor cotangent = random_tensor("cotangent", {tokens, c.heads, c.v_dim});
      for (Tensor& t: x) t.set_requires_grad(true);
      const Tensor expected = attention(x[0], x[1], x[2], span_of(whole), 0.3);
      expected.backward(cotangent);
      for (const at::ScalarType dtype: {at::kDouble, at::kFloat, at::kBFloat16}) {
        SCOPED_TRACE(fmt::format("CP {}, {}, {}", mesh.context.size(), c.name, dtype_name(dtype)));
        std::vector<Tensor> local;
        for (const Tensor& t: x)
          local.push_back(
            t.detach().index_select(0, mine).to(device(), dtype).set_requires_grad(true));
        const Tensor out =
          ring_attention(local[0], local[1], local[2], part.ring, 0.3, mesh.context);
        EXPECT_EQ(out.scalar_type(), dtype);
        out.backward(cotangent.index_select(0, mine).to(device(), dtype));
        const double tolerance = dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-5 : 0.03;
        EXPECT_LE(relative_error(out, expected.index_select(0, mine)), tolerance);
        for (size_t i = 0; i < 3; ++i)
          EXPECT_LE(relative_error(local[i].grad(), x[i].grad().index_select(0, mine)), tolerance)
            << "gradient " << i;
      }
    }
  }
}

// The same where latents go round and every rank makes keys and values of them.
TEST(Context, LatentAttentionEqualsAttention) {
  constexpr int64_t kHeads = 3, kPlain = 4, kShared = 2, kV = 3, kRank = 5;
  for (const Mesh& mesh: meshes()) {
    for (const Case& c: kCases) {
      const MicroBatch whole = whole_batch(c.length, c.documents), part = split(whole, mesh);
      const Tensor mine = part.tokens.cpu();
      const int64_t tokens = whole.num_tokens();
      std::vector<Tensor> x{random_tensor("q", {tokens, kHeads, kPlain + kShared}),
        random_tensor("latent", {tokens, kRank}), random_tensor("rotary_key", {tokens, kShared})};
      const Tensor cotangent = random_tensor("cotangent", {tokens, kHeads, kV});
      const Tensor weight = random_tensor("up", {kHeads * (kPlain + kV), kRank});
      const auto parameter = [&](at::ScalarType dtype, at::Device where) {
        Parameter up("up", weight.sizes().vec(), ParameterGroup::matrix, Init::normal);
        allocate(up, dtype, where);
        up.value.detach().copy_(weight);
        return up;
      };
      Parameter whole_up = parameter(at::kDouble, at::kCPU);
      for (Tensor& t: x) t.set_requires_grad(true);
      const auto [k, v] = expand_latent(x[1], x[2], whole_up, kHeads, kV);
      const Tensor expected = attention(x[0], k, v, span_of(whole), 0.3);
      expected.backward(cotangent);
      for (const at::ScalarType dtype: {at::kDouble, at::kFloat, at::kBFloat16}) {
        SCOPED_TRACE(fmt::format("CP {}, {}, {}", mesh.context.size(), c.name, dtype_name(dtype)));
        Parameter up = parameter(dtype, device());
        std::vector<Tensor> local;
        for (const Tensor& t: x)
          local.push_back(
            t.detach().index_select(0, mine).to(device(), dtype).set_requires_grad(true));
        const Tensor out =
          latent_attention(local[0], local[1], local[2], up, kV, part.ring, 0.3, mesh.context);
        out.backward(cotangent.index_select(0, mine).to(device(), dtype));
        mesh.context.all_reduce(up.grad);
        const double tolerance = dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-5 : 0.03;
        EXPECT_LE(relative_error(out, expected.index_select(0, mine)), tolerance);
        for (size_t i = 0; i < 3; ++i)
          EXPECT_LE(relative_error(local[i].grad(), x[i].grad().index_select(0, mine)), tolerance)
            << "gradient " << i;
        EXPECT_LE(relative_error(up.grad, whole_up.grad), tolerance);
      }
    }
  }
}

// Convolution and delta rule, states and halos travelling, against whole rows.
TEST(Context, DeltaNetEqualsWholeRows) {
  constexpr int64_t kKeys = 3, kValues = 2, kHeads = 4, kTaps = 3, kChunk = 4;
  constexpr int64_t kChannels = 2 * 2 * kKeys + kHeads * kValues;
  for (const Mesh& mesh: meshes()) {
    for (const Case& c: kCases) {
      const MicroBatch whole = whole_batch(c.length, c.documents), part = split(whole, mesh);
      const Tensor mine = part.tokens.cpu();
      const int64_t tokens = whole.num_tokens();
      // -> result, then gradients of the input, of the gates and of all parameters.
      const auto run = [&](const MicroBatch& batch, const Comm& context, const Tensor& rows,
                         at::ScalarType dtype, at::Device where) {
        const auto input = [&](const char* name, int64_t width) {
          return random_tensor(name, {tokens, width})
            .index_select(0, rows)
            .to(where, dtype)
            .set_requires_grad(true);
        };
        const auto parameter = [&](const char* name, std::vector<int64_t> shape) {
          Parameter made(name, shape, ParameterGroup::bias, Init::normal);
          allocate(made, dtype, where);
          made.value.detach().copy_(random_tensor(name, shape, at::kDouble, 0.5));
          return made;
        };
        Parameter conv = parameter("conv", {kChannels, 1, kTaps});
        Parameter a_log = parameter("a_log", {kHeads}), dt_bias = parameter("dt_bias", {kHeads});
        const Tensor x = input("x", kChannels), a = input("a", kHeads), b = input("b", kHeads);
        const TokenParts parts =
          token_parts(batch.positions, batch.cu_seqlens_host, batch.num_rows, context);
        const Tensor y = causal_convolution(x, conv, parts);
        const auto heads = [&](int64_t first, int64_t count, int64_t dim) {
          return y.narrow(1, first, count * dim).unflatten(1, {count, dim});
        };
        const Tensor out = gated_delta_rule(heads(0, 2, kKeys), heads(2 * kKeys, 2, kKeys),
          heads(4 * kKeys, kHeads, kValues), {a, b, a_log, dt_bias}, parts, {}, kChunk);
        out.backward(random_tensor("cotangent", {tokens, kHeads, kValues})
            .index_select(0, rows)
            .to(where, dtype));
        for (Parameter* sum: {&conv, &a_log, &dt_bias}) context.all_reduce(sum->grad);
        return std::vector<Tensor>{
          out, x.grad(), a.grad(), b.grad(), conv.grad, a_log.grad, dt_bias.grad};
      };
      const auto expected =
        run(whole, Comm(), at::arange(tokens, at::kLong), at::kDouble, at::kCPU);
      for (const at::ScalarType dtype: {at::kDouble, at::kFloat}) {
        SCOPED_TRACE(fmt::format("CP {}, {}, {}", mesh.context.size(), c.name, dtype_name(dtype)));
        const auto got = run(part, mesh.context, mine, dtype, device());
        for (size_t i = 0; i < got.size(); ++i)
          EXPECT_LE(relative_error(got[i], i < 4 ? expected[i].index_select(0, mine) : expected[i]),
            dtype == at::kDouble ? 1e-10 : 1e-5)
            << i;
      }
    }
  }
}

TEST(Context, DeltaNetRefusesRowsItCannotCut) {
  const MicroBatch whole = whole_batch(16, {{0}, {0}});
  Parameter conv("conv", {2, 1, 6}, ParameterGroup::bias, Init::normal);
  allocate(conv, at::kFloat, device());
  for (const Mesh& mesh: meshes()) {
    const MicroBatch part = split(whole, mesh);
    const int64_t tokens = part.num_tokens();
    EXPECT_THAT(
      error_text([&] { token_parts(part.positions, part.cu_seqlens_host, 3, mesh.context); }),
      testing::HasSubstr("rows of one length"));
    const TokenParts parts = token_parts(part.positions, part.cu_seqlens_host, 2, mesh.context);
    EXPECT_THAT(error_text([&] {
      causal_convolution(at::zeros({tokens, 2}, conv.value.options()), conv, parts);
    }),
      testing::HasSubstr("the convolution needs 5"));
  }
}

// Known fault 14: a changed token reaches no other document and no earlier position.
TEST(Context, RingAttentionStopsAtDocuments) {
  for (const Mesh& mesh: meshes()) {
    const MicroBatch whole = whole_batch(32, {{0, 13}}), part = split(whole, mesh);
    const Tensor mine = part.tokens.cpu(), x = random_tensor("x", {32, 2, 4}, at::kFloat);
    const auto run = [&](const Tensor& kv) {
      const Tensor local = kv.index_select(0, mine).to(device());
      const Tensor q = x.index_select(0, mine).to(device());
      return ring_attention(q, local, local, part.ring, 0.5, mesh.context).cpu();
    };
    Tensor changed = x.clone();
    changed[5].add_(1.0);
    const Tensor before = run(x), after = run(changed);
    for (int64_t i = 0; i < mine.numel(); ++i) {
      const auto t = mine[i].item<int64_t>();
      EXPECT_EQ(at::equal(before[i], after[i]), t < 5 || t >= 13) << "token " << t;
    }
  }
}

TEST(Context, BalanceLossIsThatOfWholeRows) {
  for (const Mesh& mesh: meshes()) {
    MicroBatch whole = whole_batch(32, {{0, 5}, {0}, {0, 31}});
    whole.row_id.narrow(0, 46, 18).bitwise_not_(); // padding: more than a chunk
    const MicroBatch part = split(whole, mesh);
    const Tensor mine = part.tokens.cpu();
    Tensor p = random_tensor("p", {96, 6}, at::kFloat).abs().set_requires_grad(true);
    const Tensor idx = topk_lowest_id(random_tensor("scores", {96, 6}), 2);
    const Tensor expected = start_balance_loss(p, idx, whole.row_id, 3)().loss;
    expected.backward();
    Tensor local = p.detach().index_select(0, mine).to(device()).set_requires_grad(true);
    const Tensor loss = start_balance_loss(
      local, idx.index_select(0, mine).to(device()), part.row_id, 3, mesh.context)()
                          .loss;
    loss.backward();
    Tensor sum = loss.detach().clone();
    mesh.context.all_reduce(sum);
    EXPECT_NEAR(sum.item<double>(), expected.item<double>(), 1e-6 * expected.item<double>());
    EXPECT_TRUE(at::equal(local.grad().cpu(), p.grad().index_select(0, mine)));
  }
}

// Loss, balance loss, routes and every gradient of a model, summed over CP ranks. One rank may hold
// no trained token.
TEST(Context, ModelEqualsOneProcess) {
  for (const Mesh& mesh: meshes()) {
    for (const bool one_label: {false, true}) {
      SCOPED_TRACE(fmt::format("CP {}, {}", mesh.context.size(), one_label ? "one label" : "all"));
      std::vector<Row> rows = ragged_rows(4, 32, 61);
      for (size_t r = 0; one_label && r < rows.size(); ++r) std::ranges::fill(rows[r].labels, -100);
      if (one_label) rows[2].labels[3] = 7;
      const auto run = [&](TinyModel& tiny, const std::vector<MicroBatch>& batches,
                         std::vector<RoutingTape>& tapes) {
        zero_grads(tiny.groups);
        tapes.resize(batches.size());
        auto pipeline = tiny.pipeline(0.1);
        return pipeline.forward_backward(batches, NextTokenLoss(), tapes);
      };
      TinyModel alone;
      std::vector<RoutingTape> routes, local_routes;
      const std::vector<MicroBatch> batches = cut(rows, 2);
      const BatchResult expected = run(alone, batches, routes);

      TinyModel tiny(tiny_config(), at::kFloat, device());
      tiny.mesh = mesh;
      std::vector<MicroBatch> parts;
      for (const MicroBatch& batch: batches) parts.push_back(split(batch, mesh));
      const BatchResult result = run(tiny, parts, local_routes);
      const auto summed = [&](const Tensor& x) {
        Tensor sum = x.clone();
        mesh.context.all_reduce(sum);
        return sum;
      };
      EXPECT_LE(relative_error(summed(result.loss_sum), expected.loss_sum), 1e-5);
      EXPECT_LE(relative_error(summed(result.balance_sum), expected.balance_sum), 1e-5);
      for (size_t b = 0; b < parts.size(); ++b) {
        MicroBatch numbered = batches[b];
        numbered.tokens = at::arange(numbered.num_tokens(), at::TensorOptions(at::kLong));
        const Tensor mine = split(numbered, mesh).tokens.cpu();
        for (const size_t layer: {0, 2})
          EXPECT_TRUE(at::equal(
            local_routes[b].topk_idx[layer].cpu(), routes[b].topk_idx[layer].index_select(0, mine)))
            << "routes of layer " << layer;
      }
      const auto whole = all_parameters(alone.groups), local = all_parameters(tiny.groups);
      for (size_t i = 0; i < whole.size(); ++i)
        EXPECT_LE(relative_error(summed(local[i]->grad), whole[i]->grad), 1e-5) << whole[i]->name;
    }
  }
}

TEST(Context, GeneratingWithACacheIsRefused) {
  for (const Mesh& mesh: meshes()) {
    const MicroBatch part = split(whole_batch(8, {{0}}), mesh);
    const RotaryTable rotary;
    const RouterTraining router;
    LayerCache cache;
    const LayerContext context{part, mesh, rotary, router, 0, &cache, nullptr};
    const Tensor q = zeros({part.num_tokens(), 2, 4}, at::kFloat);
    EXPECT_THAT(error_text([&] { attend_documents(context, q, q, q, 1); }),
      testing::HasSubstr("context parallelism"));
  }
}

} // namespace
} // namespace pith::test
