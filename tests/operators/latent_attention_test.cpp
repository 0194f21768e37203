#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include "operators/attention.h"
#include "operators/ring_attention.h"
#include "tests/operators/error_text.h"
#include "tests/operators/gradient_check.h"
#include "tests/operators/spans.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
constexpr int64_t kHeads = 3, kPlain = 4, kShared = 2, kV = 3, kRank = 5;

struct Inputs {
  Tensor q, latent, rotary_key;
  Parameter up;

  explicit Inputs(int64_t tokens, at::ScalarType dtype = at::kDouble)
      : q(random_tensor("q", {tokens, kHeads, kPlain + kShared}, dtype)),
        latent(random_tensor("latent", {tokens, kRank}, dtype)),
        rotary_key(random_tensor("rotary_key", {tokens, kShared}, dtype)),
        up(make_parameter("up", {kHeads * (kPlain + kV), kRank}, dtype, 0.5)) {}
  Tensor attend(const AttentionSpan& span) {
    return latent_attention(q, latent, rotary_key, up, kV, whole_ring(span, q.size(0)), 0.4);
  }
};

const std::vector<int32_t> kBorders[] = {{0, 1}, {0, 5}, {0, 0, 3, 3, 9}, {0, 4, 8}, {0, 0}};

// By the definition: each head's key is its part of the projection and the shared rotary key.
TEST(LatentAttention, IsAttentionOverExpandedKeys) {
  for (const auto& borders: kBorders) {
    const AttentionSpan span = make_span(borders);
    Inputs x(borders.back());
    std::vector<Tensor> k, v;
    for (int64_t head = 0; head < kHeads; ++head) {
      const auto rows = [&](int64_t first, int64_t count) {
        const Tensor part = x.up.value.detach().narrow(0, head * (kPlain + kV) + first, count);
        return at::matmul(x.latent, part.t());
      };
      k.push_back(at::cat({rows(0, kPlain), x.rotary_key}, 1).unsqueeze(1));
      v.push_back(rows(kPlain, kV).unsqueeze(1));
    }
    const Tensor expected = attention(x.q, at::cat(k, 1), at::cat(v, 1), span, 0.4);
    const Tensor got = x.attend(span);
    EXPECT_EQ(got.sizes(), expected.sizes());
    EXPECT_LE(max_difference(got, expected), 1e-12);
  }
}

TEST(LatentAttention, GradientsMatchFiniteDifferences) {
  const OneThread scope;
  for (const auto& borders: kBorders) {
    const AttentionSpan span = make_span(borders);
    Inputs x(borders.back());
    check_gradients([&] { return x.attend(span); }, {x.q, x.latent, x.rotary_key}, {&x.up});
    check_gradients([&] {
      const auto [k, v] = expand_latent(x.latent, x.rotary_key, x.up, kHeads, kV);
      return attention(x.q, k, v, span, 0.4);
    }, {x.q, x.latent, x.rotary_key}, {&x.up});
  }
}

TEST(LatentAttention, BFloat16AgreesWithFloat) {
  const AttentionSpan span = make_span({0, 20, 33});
  std::vector<Tensor> results[2];
  for (const bool wide: {false, true}) {
    Inputs x(33, at::kBFloat16);
    if (wide) {
      const at::NoGradGuard no_grad;
      const Tensor rounded = x.up.value.detach().clone();
      x.up = make_parameter("up", {kHeads * (kPlain + kV), kRank}, at::kFloat);
      x.up.value.copy_(rounded);
    }
    std::vector<Tensor> leaves{x.q, x.latent, x.rotary_key};
    for (Tensor& t: leaves) t = (wide ? t.to(at::kFloat) : t).set_requires_grad(true);
    x.up.grad.zero_();
    const Tensor out =
      latent_attention(leaves[0], leaves[1], leaves[2], x.up, kV, whole_ring(span, 33), 0.4);
    out.backward(random_tensor("dout", out.sizes().vec(), at::kBFloat16).to(out.scalar_type()));
    results[wide] = {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad(), x.up.grad};
  }
  for (size_t i = 0; i < 5; ++i)
    EXPECT_LE(relative_difference(results[0][i], results[1][i]), 0.02) << i;
}

TEST(LatentAttention, NamesWhatDoesNotFit) {
  Inputs x(6);
  EXPECT_TRUE(contains(error_text([&] { x.attend(make_span({0, 5})); }), "q has 6 rows"));
  x.rotary_key = random_tensor("rotary_key", {6, kShared + 1});
  EXPECT_TRUE(contains(error_text([&] { x.attend(make_span({0, 6})); }), "attention: k"));
  const auto wide = [&] { expand_latent(x.latent, x.rotary_key, x.up, kHeads, 7); };
  EXPECT_TRUE(contains(error_text(wide), "values of 7 elements for 3 heads"));
}

} // namespace
} // namespace pith::test
