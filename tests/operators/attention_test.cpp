#include "operators/attention.h"
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include "tests/operators/error_text.h"
#include "tests/operators/gradient_check.h"
#include "tests/operators/spans.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
// Straight from the definition, one query at a time, in FP64.
Tensor naive_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionSpan& span,
  double scale, int64_t window = 0, const Tensor& sinks = {}) {
  const Tensor query = q.to(at::kDouble).contiguous(), key = k.to(at::kDouble).contiguous();
  const Tensor value = v.to(at::kDouble).contiguous();
  const int64_t heads = q.size(1), kv_heads = k.size(1), dim = q.size(2), v_dim = v.size(2);
  const Tensor out = at::zeros({q.size(0), heads, v_dim}, query.options());
  const int32_t *cu_q = span.cu_q_host.data_ptr<int32_t>(),
                *cu_k = span.cu_k_host.data_ptr<int32_t>();
  auto at = [&](const Tensor& x, int64_t row, int64_t head) {
    return x.data_ptr<double>() + (row * x.size(1) + head) * x.size(2);
  };
  for (int64_t d = 0; d + 1 < span.cu_q_host.numel(); ++d) {
    const int64_t extra = (cu_k[d + 1] - cu_k[d]) - (cu_q[d + 1] - cu_q[d]);
    for (int64_t i = cu_q[d]; i < cu_q[d + 1]; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t g = h / (heads / kv_heads);
        double total = sinks.defined() ? std::exp(sinks[h].item<double>()) : 0;
        double* o = at(out, i, h);
        const int64_t own = cu_k[d] + (i - cu_q[d]) + extra;
        const int64_t first = window > 0 ? std::max<int64_t>(cu_k[d], own - window + 1) : cu_k[d];
        for (int64_t j = first; j <= own; ++j) {
          double score = 0;
          for (int64_t c = 0; c < dim; ++c) score += at(query, i, h)[c] * at(key, j, g)[c];
          const double weight = std::exp(scale * score);
          total += weight;
          for (int64_t c = 0; c < v_dim; ++c) o[c] += weight * at(value, j, g)[c];
        }
        for (int64_t c = 0; c < v_dim; ++c) o[c] /= total;
      }
    }
  }
  return out;
}

struct Case {
  std::vector<int32_t> cu_q, cu_k;
  int64_t heads, kv_heads, dim;
  int64_t v_dim = dim;
};

const Case kCases[] = {
  {{0, 5}, {0, 5}, 2, 2, 4}, // one document
  {{0, 1}, {0, 1}, 3, 1, 2}, // one token
  {{0, 0, 5, 5, 12}, {0, 0, 5, 5, 12}, 4, 2, 3}, // empty documents, odd head size
  {{0, 4, 8, 12}, {0, 4, 8, 12}, 2, 1, 8}, // equal documents
  {{0, 3, 6, 7, 8, 13}, {0, 3, 6, 7, 8, 13}, 6, 3, 5},
  {{0, 1, 2}, {0, 7, 12}, 4, 2, 4}, // decoding: one query each
  {{0, 3, 3, 5}, {0, 9, 13, 15}, 4, 1, 4}, // fewer queries than keys, none, as many
  {{0, 4, 4, 9}, {0, 4, 4, 9}, 4, 2, 6, 3}, // values narrower than keys, and wider
  {{0, 5, 10}, {0, 5, 10}, 2, 1, 3, 5},
  {{0, 1, 3}, {0, 7, 12}, 2, 2, 3, 2},
};

struct Inputs {
  Tensor q, k, v;
};

Inputs inputs(const Case& c, at::ScalarType dtype) {
  return {random_tensor("q", {c.cu_q.back(), c.heads, c.dim}, dtype),
    random_tensor("k", {c.cu_k.back(), c.kv_heads, c.dim}, dtype),
    random_tensor("v", {c.cu_k.back(), c.kv_heads, c.v_dim}, dtype)};
}

TEST(Attention, MatchesTheDefinition) {
  for (const Case& c: kCases) {
    const AttentionSpan span = make_span(c.cu_q, c.cu_k);
    const Inputs x = inputs(c, at::kDouble);
    const Tensor expected = naive_attention(x.q, x.k, x.v, span, 0.3);
    EXPECT_LE(max_difference(attention(x.q, x.k, x.v, span, 0.3), expected), 1e-13);
    const Inputs f = inputs(c, at::kFloat);
    EXPECT_LE(max_difference(attention(f.q, f.k, f.v, span, 0.3), expected), 1e-5);
    const Inputs b = inputs(c, at::kBFloat16);
    const Tensor rounded = naive_attention(b.q, b.k, b.v, span, 0.3);
    // 8 bits of significand in the probabilities and in the result; |out| < 4.
    EXPECT_LE(max_difference(attention(b.q, b.k, b.v, span, 0.3), rounded), 0.04);
  }
}

TEST(Attention, GradientsMatchFiniteDifferences) {
  const OneThread scope;
  for (const Case& c: kCases) {
    const AttentionSpan span = make_span(c.cu_q, c.cu_k);
    const Inputs x = inputs(c, at::kDouble);
    check_gradients([&] { return attention(x.q, x.k, x.v, span, 0.4); }, {x.q, x.k, x.v}, {});
  }
}

TEST(Attention, WindowsAndSinksMatchTheDefinition) {
  const OneThread scope;
  for (const Case& c: kCases) {
    const AttentionSpan span = make_span(c.cu_q, c.cu_k);
    for (const int64_t window: {0, 1, 2, 4, 9, 100}) {
      SCOPED_TRACE(fmt::format("{} queries, window {}", c.cu_q.back(), window));
      Parameter sinks = make_parameter("sinks", {c.heads});
      const Inputs x = inputs(c, at::kDouble);
      const auto with = [&](Parameter* s) {
        return attention(x.q, x.k, x.v, span, 0.4, {.window = window, .sinks = s});
      };
      EXPECT_LE(
        max_difference(with(nullptr), naive_attention(x.q, x.k, x.v, span, 0.4, window)), 1e-13);
      EXPECT_LE(max_difference(with(&sinks),
                  naive_attention(x.q, x.k, x.v, span, 0.4, window, sinks.value.detach())),
        1e-13);
      check_gradients([&] { return with(&sinks); }, {x.q, x.k, x.v}, {&sinks});
      const Inputs b = inputs(c, at::kBFloat16);
      Parameter rounded = make_parameter("sinks", {c.heads}, at::kBFloat16);
      EXPECT_LE(max_difference(attention(b.q, b.k, b.v, span, 0.4, {window, &rounded}),
                  naive_attention(
                    b.q, b.k, b.v, span, 0.4, window, rounded.value.detach().to(at::kDouble))),
        0.04);
    }
  }
}

// Known fault 13: a window counts the token itself.
TEST(Attention, AWindowHoldsAsManyKeysAsItSays) {
  Tensor q = random_tensor("q", {6, 1, 4}, at::kFloat),
         k = random_tensor("k", {6, 1, 4}, at::kFloat);
  Tensor v = random_tensor("v", {6, 1, 4}, at::kFloat);
  const AttentionSpan span = make_span({0, 6});
  const auto run = [&](
                     int64_t window) { return attention(q, k, v, span, 0.5, {.window = window}); };
  const Tensor before = run(4), whole = run(0);
  EXPECT_TRUE(at::equal(run(6), whole));
  k.select(0, 0).add_(1.0);
  v.select(0, 0).sub_(2.0);
  const Tensor after = run(4);
  for (int64_t t = 0; t < 6; ++t)
    EXPECT_EQ(at::equal(before.select(0, t), after.select(0, t)), t >= 4) << t;
}

// With a sink far above all scores nothing is left of the values; far below, everything.
TEST(Attention, ExtremeSinks) {
  const Inputs x = inputs({{0, 5}, {0, 5}, 2, 2, 4}, at::kFloat);
  const AttentionSpan span = make_span({0, 5});
  Parameter sinks = make_parameter("sinks", {2}, at::kFloat);
  sinks.value.detach().fill_(300.0);
  const auto run = [&] { return attention(x.q, x.k, x.v, span, 0.4, {.sinks = &sinks}); };
  EXPECT_EQ(run().abs().max().item<float>(), 0);
  sinks.value.detach().fill_(-300.0);
  EXPECT_LE(max_difference(run(), attention(x.q, x.k, x.v, span, 0.4)), 1e-6);
  x.q.set_requires_grad(true);
  run().sum().backward();
  EXPECT_EQ(sinks.grad.abs().max().item<float>(), 0);
}

TEST(Attention, Bfloat16GradientsAgreeWithFloat) {
  const Case c{{0, 33, 50}, {0, 33, 50}, 4, 2, 16};
  const AttentionSpan span = make_span(c.cu_q, c.cu_k);
  std::vector<Tensor> gradients[2];
  for (bool wide: {false, true}) {
    Inputs x = inputs(c, at::kBFloat16);
    for (Tensor* t: {&x.q, &x.k, &x.v}) {
      *t = wide ? t->to(at::kFloat) : *t;
      t->set_requires_grad(true);
    }
    const Tensor out = attention(x.q, x.k, x.v, span, 0.25);
    out.backward(random_tensor("dout", out.sizes().vec(), at::kBFloat16).to(out.scalar_type()));
    gradients[wide] = {x.q.grad(), x.k.grad(), x.v.grad()};
  }
  for (size_t i = 0; i < 3; ++i)
    EXPECT_LE(relative_difference(gradients[0][i], gradients[1][i]), 0.02);
}

// Known fault 35: documents without tokens change nothing.
TEST(Attention, EmptyDocumentsAddNothing) {
  const Tensor q = random_tensor("q", {12, 4, 8}, at::kFloat),
               k = random_tensor("k", {12, 2, 8}, at::kFloat);
  const Tensor v = random_tensor("v", {12, 2, 8}, at::kFloat);
  const Tensor with = attention(q, k, v, make_span({0, 0, 5, 5, 12, 12}), 0.5);
  EXPECT_TRUE(at::equal(with, attention(q, k, v, make_span({0, 5, 12}), 0.5)));
}

// Known fault 14: flipping a token of one document must not reach another, nor an earlier position.
TEST(Attention, StopsAtDocumentsAndAtThePresent) {
  const AttentionSpan span = make_span({0, 6, 12});
  Tensor q = random_tensor("q", {12, 2, 4}, at::kFloat),
         k = random_tensor("k", {12, 2, 4}, at::kFloat);
  Tensor v = random_tensor("v", {12, 2, 4}, at::kFloat);
  const Tensor before = attention(q, k, v, span, 0.5);
  k.select(0, 3).add_(1.0);
  v.select(0, 3).sub_(2.0);
  const Tensor after = attention(q, k, v, span, 0.5);
  for (int64_t t = 0; t < 12; ++t) {
    EXPECT_EQ(at::equal(before.select(0, t), after.select(0, t)), t < 3 || t >= 6) << t;
  }
}

TEST(Attention, TakesSlicesOfAFusedProjection) {
  const Tensor fused = random_tensor("qkv", {9, 8, 4}, at::kFloat);
  const AttentionSpan span = make_span({0, 4, 9});
  auto slice = [&](int64_t first, int64_t count) { return fused.narrow(1, first, count); };
  const Tensor strided = attention(slice(0, 4), slice(4, 2), slice(6, 2), span, 0.5);
  EXPECT_TRUE(at::equal(strided,
    attention(
      slice(0, 4).contiguous(), slice(4, 2).contiguous(), slice(6, 2).contiguous(), span, 0.5)));
}

TEST(Attention, DecodingContinuesTheFullResult) {
  const Tensor q = random_tensor("q", {20, 4, 8}, at::kFloat),
               k = random_tensor("k", {20, 2, 8}, at::kFloat);
  const Tensor v = random_tensor("v", {20, 2, 8}, at::kFloat);
  const Tensor full = attention(q, k, v, make_span({0, 20}), 0.4);
  for (int32_t n: {1, 2, 7}) {
    const Tensor tail = attention(q.narrow(0, 20 - n, n), k, v, make_span({0, n}, {0, 20}), 0.4);
    EXPECT_LE(max_difference(tail, full.narrow(0, 20 - n, n)), 1e-6) << n;
  }
}

TEST(Attention, NoTokensAtAll) {
  Tensor q = at::zeros({0, 4, 8}), k = at::zeros({0, 2, 8});
  q.set_requires_grad(true);
  const Tensor out = attention(q, k, k, make_span({0, 0}), 0.4);
  EXPECT_EQ(out.sizes(), q.sizes());
  out.sum().backward();
  EXPECT_EQ(q.grad().sizes(), q.sizes());
}

TEST(Attention, NamesWhatDoesNotFit) {
  const Tensor q = at::zeros({6, 4, 8}), k = at::zeros({6, 2, 8}), odd = at::zeros({6, 3, 8});
  const AttentionSpan span = make_span({0, 6});
  auto error = [&](const Tensor& a, const Tensor& b, const Tensor& c, const AttentionSpan& s) {
    return error_text([&] { attention(a, b, c, s, 1.0); });
  };
  EXPECT_TRUE(contains(error(q.select(0, 0), k, k, span), "attention: q"));
  EXPECT_TRUE(contains(error(q, odd, odd, span), "4 query heads over 3 key heads"));
  EXPECT_TRUE(contains(error(q, k, odd, span), "attention: v"));
  EXPECT_TRUE(contains(error(q, k.to(at::kDouble), k, span), "attention: k"));
  EXPECT_TRUE(contains(error(q, k, k, make_span({0, 5})), "q has 6 rows"));
  Parameter sinks = make_parameter("layers.3.sinks", {3}, at::kFloat);
  EXPECT_TRUE(contains(
    error_text([&] { attention(q, k, k, span, 1.0, {.sinks = &sinks}); }), "layers.3.sinks"));
  EXPECT_TRUE(
    contains(error(q, k, k, make_span({0, 4, 6}, {0, 3, 6})), "document 0 has 4 queries and 3"));
}

} // namespace
} // namespace pith::test
