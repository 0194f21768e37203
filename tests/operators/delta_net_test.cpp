#include "operators/delta_net.h"
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include "tests/operators/error_text.h"
#include "tests/operators/gradient_check.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
using Lengths = std::vector<int64_t>;

// Positions of documents of these lengths.
Tensor positions_of(const Lengths& documents) {
  std::vector<int32_t> positions;
  for (const int64_t length: documents)
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
  return at::tensor(positions, at::kInt);
}

// Shorter than the convolution and than a chunk, borders at chunks and in them, one long document.
const Lengths kDocuments[] = {{1}, {5}, {1, 1, 2, 3}, {4, 4}, {3, 6, 1}, {7, 2, 1, 3}, {13}};

struct DeltaInputs {
  Tensor q, k, v, a, b;
  Parameter a_log, dt_bias;

  explicit DeltaInputs(int64_t tokens, at::ScalarType dtype = at::kDouble, int64_t key_heads = 1,
    int64_t heads = 2, int64_t dk = 3, int64_t dv = 2)
      : q(random_tensor("q", {tokens, key_heads, dk}, dtype)),
        k(random_tensor("k", {tokens, key_heads, dk}, dtype)),
        v(random_tensor("v", {tokens, heads, dv}, dtype)),
        a(random_tensor("a", {tokens, heads}, dtype)),
        b(random_tensor("b", {tokens, heads}, dtype)),
        a_log(make_parameter("a_log", {heads}, dtype, 0.5, -0.5)),
        dt_bias(make_parameter("dt_bias", {heads}, dtype, 0.3)) {}
  Tensor run(const TokenParts& parts, int64_t chunk, const Tensor& state = {}) {
    return gated_delta_rule(q, k, v, {a, b, a_log, dt_bias}, parts, state, chunk);
  }
  std::vector<Tensor> all() { return {q, k, v, a, b}; }
};

// Token after token, by the definition; differentiable. `state`, if defined, is where it begins.
Tensor step_by_step(const DeltaInputs& x, const Tensor& positions, Tensor* state = nullptr) {
  const auto normal = [](const Tensor& t) { return t * (t.square().sum(-1, true) + 1e-6).rsqrt(); };
  const int64_t heads = x.v.size(1), repeat = heads / x.k.size(1), dk = x.k.size(2);
  const Tensor q = (normal(x.q) / std::sqrt(static_cast<double>(dk))).repeat_interleave(repeat, 1);
  const Tensor k = normal(x.k).repeat_interleave(repeat, 1);
  const Tensor g = -x.a_log.value.exp() * at::softplus(x.a + x.dt_bias.value);
  const Tensor beta = at::sigmoid(x.b);
  Tensor s = at::zeros({heads, dk, x.v.size(2)}, x.v.options());
  if (state != nullptr && state->defined()) s = *state;
  std::vector<Tensor> out;
  for (int64_t t = 0; t < x.v.size(0); ++t) {
    if (positions[t].item<int32_t>() == 0) s = at::zeros_like(s);
    s = s * g[t].exp().view({heads, 1, 1});
    const Tensor delta =
      (x.v[t] - (s * k[t].unsqueeze(2)).sum(1)) * beta[t].unsqueeze(1); // (heads, dv)
    s = s + k[t].unsqueeze(2) * delta.unsqueeze(1);
    out.push_back((s * q[t].unsqueeze(2)).sum(1));
  }
  if (state != nullptr) *state = s;
  return at::stack(out);
}

TEST(DeltaRule, ChunkedEqualsStepByStep) {
  for (const Lengths& documents: kDocuments)
    for (const int64_t chunk: {1, 3, 4, 64}) {
      SCOPED_TRACE(fmt::format("{} in chunks of {}", fmt::join(documents, " "), chunk));
      const Tensor positions = positions_of(documents);
      DeltaInputs x(positions.size(0), at::kDouble, 2, 4, 5, 3);
      EXPECT_LE(max_difference(x.run({positions}, chunk), step_by_step(x, positions)), 1e-13);
    }
}

// Longer than the real chunk; all gradients by autograd through the recurrence.
TEST(DeltaRule, LongDocuments) {
  const Lengths documents{70, 2, 1, 130, 64, 5};
  const Tensor positions = positions_of(documents);
  const int64_t tokens = positions.size(0);
  DeltaInputs x(tokens, at::kDouble, 2, 4, 8, 6), y(tokens, at::kDouble, 2, 4, 8, 6);
  const Tensor dout = random_tensor("dout", {tokens, 4, 6});
  for (Tensor& input: x.all()) input.set_requires_grad(true);
  for (Tensor& input: y.all()) input.set_requires_grad(true);
  const Tensor out = x.run({positions}, 64), expected = step_by_step(y, positions);
  EXPECT_LE(max_difference(out, expected), 1e-12);
  out.backward(dout), expected.backward(dout);
  for (size_t i = 0; i < 5; ++i)
    EXPECT_LE(relative_difference(x.all()[i].grad(), y.all()[i].grad()), 1e-11) << i;
  EXPECT_LE(relative_difference(x.a_log.grad, y.a_log.value.grad()), 1e-11);
  EXPECT_LE(relative_difference(x.dt_bias.grad, y.dt_bias.value.grad()), 1e-11);
}

TEST(DeltaRule, GradientsMatchFiniteDifferences) {
  const OneThread scope;
  for (const Lengths& documents: kDocuments) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(documents, " ")));
    const Tensor positions = positions_of(documents);
    DeltaInputs x(positions.size(0));
    check_gradients(
      [&] { return x.run({positions}, 4); }, x.all(), {&x.a_log, &x.dt_bias}, 1e-6, 1e-5);
  }
}

// Documents one after another are the documents alone; equal parts are computed side by side.
TEST(DeltaRule, DocumentsAndPartsAreSeparate) {
  const Lengths documents{3, 6, 9, 2, 7, 9};
  const Tensor positions = positions_of(documents);
  DeltaInputs x(36, at::kDouble, 2, 4);
  const Tensor all = x.run({positions}, 4);
  EXPECT_LE(max_difference(all, x.run({positions, 2}, 4)), 1e-14);
  int64_t begin = 0;
  for (const int64_t length: documents) {
    DeltaInputs alone(0, at::kDouble, 2, 4);
    for (auto part:
      {&DeltaInputs::q, &DeltaInputs::k, &DeltaInputs::v, &DeltaInputs::a, &DeltaInputs::b})
      alone.*part = (x.*part).narrow(0, begin, length);
    EXPECT_LE(
      max_difference(all.narrow(0, begin, length), alone.run({positions_of({length})}, 4)), 1e-14);
    begin += length;
  }
}

// A state carries a document over calls of any lengths, two sequences side by side.
TEST(DeltaRule, StateContinues) {
  const int64_t length = 12;
  const Tensor positions = positions_of({length, length});
  DeltaInputs x(2 * length, at::kDouble, 2, 4, 5, 3);
  const Tensor whole = x.run({positions, 2}, 64).view({2, length, 4, 3});
  const Tensor state = random_tensor("state", {2, 4, 5, 3}); // forgotten at position 0
  for (const auto& [begin, count]: {std::pair<int64_t, int64_t>{0, 7}, {7, 1}, {8, 4}}) {
    const auto rows = [&, begin = begin, count = count](const Tensor& t) {
      std::vector<int64_t> shape = t.sizes().vec();
      shape[0] = length, shape.insert(shape.begin(), 2);
      return t.view(shape).narrow(1, begin, count).flatten(0, 1);
    };
    DeltaInputs part(0, at::kDouble, 2, 4, 5, 3);
    for (auto member:
      {&DeltaInputs::q, &DeltaInputs::k, &DeltaInputs::v, &DeltaInputs::a, &DeltaInputs::b})
      part.*member = rows(x.*member);
    const Tensor out = part.run({rows(positions), 2}, 4, state);
    EXPECT_LE(max_difference(out.view({2, count, 4, 3}), whole.narrow(1, begin, count)), 1e-13);
  }
}

// Known hard inputs: equal keys (whose powers of the triangular matrix grow), strong forgetting,
// vectors of zeros.
TEST(DeltaRule, StableInFloat) {
  const int64_t tokens = 200;
  const Tensor positions = positions_of({150, 50});
  DeltaInputs x(tokens, at::kFloat, 1, 2, 16, 16), exact(tokens, at::kDouble, 1, 2, 16, 16);
  for (DeltaInputs* inputs: {&x, &exact}) {
    const at::NoGradGuard no_grad;
    inputs->k.copy_(inputs->k[0].clone().expand_as(inputs->k));
    inputs->k.narrow(0, 40, 3).zero_();
    inputs->b.fill_(4);
    inputs->a.narrow(0, 0, 100).fill_(-9);
    inputs->a.narrow(0, 100, 4).fill_(60);
  }
  const Tensor out = x.run({positions}, 64);
  EXPECT_LE(relative_difference(out, step_by_step(exact, positions)), 2e-5);
}

TEST(DeltaRule, BFloat16) {
  const Tensor positions = positions_of({90, 38});
  DeltaInputs x(128, at::kBFloat16, 2, 4, 8, 8);
  for (Tensor& input: x.all()) input.set_requires_grad(true);
  const Tensor out = x.run({positions}, 64),
               dout = random_tensor("dout", {128, 4, 8}, at::kBFloat16);
  out.backward(dout);
  DeltaInputs wide(128, at::kDouble, 2, 4, 8, 8);
  for (auto member:
    {&DeltaInputs::q, &DeltaInputs::k, &DeltaInputs::v, &DeltaInputs::a, &DeltaInputs::b})
    wide.*member = (x.*member).detach().to(at::kDouble).set_requires_grad(true);
  wide.a_log.value = x.a_log.value.detach().to(at::kDouble);
  wide.dt_bias.value = x.dt_bias.value.detach().to(at::kDouble);
  wide.run({positions}, 64).backward(dout.to(at::kDouble));
  EXPECT_LE(relative_difference(out, wide.run({positions}, 64)), 0x1p-8);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(x.all()[i].grad().scalar_type(), at::kBFloat16);
    EXPECT_LE(relative_difference(x.all()[i].grad(), wide.all()[i].grad()), 0x1p-8) << i;
  }
}

TEST(DeltaRule, NoTokens) {
  DeltaInputs x(0, at::kDouble, 2, 4, 5, 3);
  x.v.set_requires_grad(true);
  const Tensor out = x.run({positions_of({})}, 64);
  EXPECT_EQ(out.sizes(), at::IntArrayRef({0, 4, 3}));
  out.sum().backward();
  Parameter w = make_parameter("w", {3, 1, 4});
  EXPECT_EQ(causal_convolution(at::zeros({0, 3}, at::kDouble), w, {positions_of({})}).size(0), 0);
}

TEST(DeltaRule, Refuses) {
  DeltaInputs x(4, at::kDouble, 2, 3);
  EXPECT_THROW(x.run({positions_of({4})}, 4), Error); // 3 heads over 2 keys
  DeltaInputs y(4);
  EXPECT_THROW(y.run({positions_of({3})}, 4), Error);
  EXPECT_THROW(y.run({positions_of({4}), 3}, 4), Error);
}

// --- the convolution ---

Tensor convolve(const Tensor& x, const Tensor& weight, const Tensor& positions) {
  std::vector<Tensor> out;
  for (int64_t t = 0; t < x.size(0); ++t) {
    Tensor sum = at::zeros_like(x[0]);
    for (int64_t j = 0; j <= positions[t].item<int32_t>() && j < weight.size(2); ++j)
      sum = sum + x[t - j] * weight.select(1, 0).select(1, weight.size(2) - 1 - j);
    out.push_back(sum * at::sigmoid(sum));
  }
  return at::stack(out);
}

TEST(CausalConvolution, StopsAtDocuments) {
  const OneThread scope;
  for (const Lengths& documents: kDocuments) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(documents, " ")));
    const Tensor positions = positions_of(documents);
    Tensor wide = random_tensor("x", {positions.size(0), 5});
    const auto x = [&] { return wide.narrow(1, 1, 3); }; // a slice of a fused projection
    Parameter w = make_parameter("w", {3, 1, 4});
    const TokenParts parts{positions};
    EXPECT_LE(
      max_difference(causal_convolution(x(), w, parts), convolve(x(), w.value, positions)), 1e-14);
    check_gradients([&] { return causal_convolution(x(), w, parts); }, {wide}, {&w});
  }
}

TEST(CausalConvolution, StateContinues) {
  const Tensor positions = positions_of({9, 9}), x = random_tensor("x", {18, 3});
  Parameter w = make_parameter("w", {3, 1, 4});
  const Tensor whole = causal_convolution(x, w, {positions, 2}).view({2, 9, 3});
  EXPECT_LE(max_difference(whole.flatten(0, 1), causal_convolution(x, w, {positions})), 0);
  const Tensor state = random_tensor("state", {2, 3, 3});
  for (const auto& [begin, count]: {std::pair<int64_t, int64_t>{0, 2}, {2, 1}, {3, 6}}) {
    const Tensor part = x.view({2, 9, 3}).narrow(1, begin, count).flatten(0, 1);
    const Tensor at = positions.view({2, 9}).narrow(1, begin, count).flatten();
    const Tensor out = causal_convolution(part, w, {at, 2}, state);
    EXPECT_LE(max_difference(out.view({2, count, 3}), whole.narrow(1, begin, count)), 1e-15);
  }
}

// --- parts ---

TEST(TokenParts, AreRowsOfOneLength) {
  const auto count = [](std::vector<int32_t> borders, int64_t rows, int64_t tokens) {
    return token_parts(at::zeros({tokens}, at::kInt), at::tensor(borders, at::kInt), rows).count;
  };
  EXPECT_EQ(count({0, 3, 4, 8}, 2, 8), 2);
  EXPECT_EQ(count({0, 3, 5, 8}, 2, 8), 1); // 3 and 5, or 5 and 3
  EXPECT_EQ(count({0, 4, 4, 8}, 2, 8), 2);
  EXPECT_EQ(count({0, 9}, 2, 9), 1);
  EXPECT_EQ(count({0, 9}, 0, 9), 1);
  EXPECT_EQ(count({0, 0}, 1, 0), 1);
}

} // namespace
} // namespace pith::test
