#include "operators/linear_cross_entropy.h"
#include <ATen/ops/equal.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include "tests/operators/error_text.h"
#include "tests/operators/gradient_check.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
// T labels in [0, vocabulary), every third -100.
Tensor some_labels(int64_t tokens, int64_t vocabulary) {
  std::vector<int64_t> labels;
  for (int64_t t = 0; t < tokens; ++t)
    labels.push_back(t % 3 == 2 ? -100 : (t * 7 + 3) % vocabulary);
  return ids(labels, {tokens});
}

TEST(LinearCrossEntropy, GradientsMatchFiniteDifferences) {
  const OneThread scope;
  for (auto [tokens, hidden_size, vocabulary]:
    {std::array<int64_t, 3>{7, 5, 11}, {1, 3, 2}, {4, 4, 4}}) {
    Parameter weight = make_parameter("head", {vocabulary, hidden_size});
    const Tensor hidden = random_tensor("hidden", {tokens, hidden_size});
    const Tensor labels = some_labels(tokens, vocabulary);
    check_gradients(
      [&] { return linear_cross_entropy(hidden, weight, labels, 0.25).loss; }, {hidden}, {&weight});
    check_gradients([&] { return linear_cross_entropy(hidden, weight, labels, 3.0, 2).loss; },
      {hidden}, {&weight});
  }
}

struct Result {
  CrossEntropy entropy;
  Tensor dhidden, dweight;
};

Result run(
  at::ScalarType dtype, int64_t tokens, int64_t vocabulary, int64_t chunk, double scale = 0.125) {
  Parameter weight = make_parameter("head", {vocabulary, 24}, dtype, 0.3);
  Tensor hidden = random_tensor("hidden", {tokens, 24}, dtype).set_requires_grad(true);
  Result result;
  result.entropy =
    linear_cross_entropy(hidden, weight, some_labels(tokens, vocabulary), scale, chunk);
  result.entropy.loss.backward();
  result.dhidden = hidden.grad();
  result.dweight = weight.grad;
  return result;
}

TEST(LinearCrossEntropy, DoesNotDependOnTheChunk) {
  const Result whole = run(at::kDouble, 29, 37, 29);
  for (int64_t chunk: {0, 1, 2, 7, 28, 64}) {
    const Result cut = run(at::kDouble, 29, 37, chunk);
    EXPECT_LE(max_difference(cut.entropy.logprobs, whole.entropy.logprobs), 1e-13);
    EXPECT_LE(max_difference(cut.entropy.loss, whole.entropy.loss), 1e-13);
    EXPECT_LE(max_difference(cut.dhidden, whole.dhidden), 1e-13);
    EXPECT_LE(max_difference(cut.dweight, whole.dweight), 1e-13);
  }
}

TEST(LinearCrossEntropy, MatchesLogSoftmax) {
  for (auto dtype: {at::kFloat, at::kBFloat16}) {
    const Result result = run(dtype, 50, 257, 16);
    const Tensor hidden = random_tensor("hidden", {50, 24}, dtype).to(at::kDouble);
    const Parameter weight = make_parameter("head", {257, 24}, dtype, 0.3);
    const Tensor value = weight.value.detach().to(at::kDouble), labels = some_labels(50, 257);
    const Tensor logprobs = at::log_softmax(at::matmul(hidden, value.t()), 1);
    const Tensor trained = labels.ge(0).to(at::kDouble);
    const Tensor expected =
      logprobs.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1) * trained;
    EXPECT_LE(max_difference(result.entropy.logprobs, expected),
      1e-5); // FP32 logits of BF16 products
    EXPECT_NEAR(result.entropy.loss_sum.item<double>(), -expected.sum().item<double>(), 1e-3);
    EXPECT_NEAR(result.entropy.loss.item<double>(), -expected.sum().item<double>() / 8, 1e-4);
    Tensor dlogits = logprobs.exp();
    dlogits.scatter_add_(1, labels.clamp_min(0).unsqueeze(1), -at::ones({50, 1}, at::kDouble));
    dlogits.mul_(trained.unsqueeze(1) * 0.125);
    const double rounding = dtype == at::kFloat ? 1e-5 : 1.0 / 128;
    EXPECT_EQ(result.dhidden.scalar_type(), dtype);
    EXPECT_LE(relative_difference(result.dhidden, at::matmul(dlogits, value)), rounding);
    EXPECT_LE(relative_difference(result.dweight, at::matmul(dlogits.t(), hidden)), rounding);
    EXPECT_FALSE(
      result.entropy.loss_sum.requires_grad() || result.entropy.logprobs.requires_grad());
    EXPECT_LE(
      max_difference(head_logits(hidden.to(dtype), weight), at::matmul(hidden, value.t())), 1e-4);
  }
}

// Known fault 1: two micro-batches with 1 and 3 trained tokens; sums divided by the global count
// give 1.75.
TEST(LinearCrossEntropy, ScaleIsTheGlobalCount) {
  Parameter weight = make_parameter("head", {2, 1}, at::kFloat);
  {
    at::NoGradGuard no_grad;
    weight.value.copy_(values({0, 1}, {2, 1}));
  }
  auto logit_for = [](double entropy) { return static_cast<float>(std::log(std::expm1(entropy))); };
  const float four = logit_for(4.0), one = logit_for(1.0);
  const auto first = linear_cross_entropy(values({four}, {1, 1}), weight, ids({0}, {1}), 0.25);
  const auto second = linear_cross_entropy(
    values({one, one, 9, one}, {4, 1}), weight, ids({0, 0, -100, 0}, {4}), 0.25);
  EXPECT_NEAR(first.loss.item<double>() + second.loss.item<double>(), 1.75, 1e-6);
}

// Known fault 58: a batch without a trained token has the loss 0 and gradients of exactly 0.
TEST(LinearCrossEntropy, NothingTrained) {
  Parameter weight = make_parameter("head", {5, 4}, at::kFloat);
  Tensor hidden = random_tensor("hidden", {3, 4}, at::kFloat).set_requires_grad(true);
  const auto result = linear_cross_entropy(hidden, weight, at::full({3}, -100, at::kLong), 0.5);
  result.loss.backward();
  EXPECT_EQ(result.loss.item<float>(), 0.0f);
  EXPECT_TRUE(at::equal(hidden.grad(), at::zeros({3, 4})));
  EXPECT_TRUE(at::equal(weight.grad, at::zeros({5, 4})));
  const auto empty =
    linear_cross_entropy(hidden.narrow(0, 0, 0), weight, at::zeros({0}, at::kLong), 0.5);
  EXPECT_EQ(empty.loss.item<float>(), 0.0f);
}

// Ignored rows contribute exactly zero: same bits as without them in FP64 products of one chunk
// each.
TEST(LinearCrossEntropy, IgnoredRowsContributeNothing) {
  const Tensor hidden = random_tensor("hidden", {6, 4}),
               labels = ids({1, -100, 2, -100, -100, 0}, {6});
  const Tensor kept = hidden.index_select(0, ids({0, 2, 5}, {3}));
  Parameter all = make_parameter("head", {3, 4}), few = make_parameter("head", {3, 4});
  Tensor x = hidden.clone().set_requires_grad(true);
  linear_cross_entropy(x, all, labels, 1.0).loss.backward();
  linear_cross_entropy(kept, few, ids({1, 2, 0}, {3}), 1.0).loss.backward();
  EXPECT_LE(max_difference(all.grad, few.grad), 1e-15);
  EXPECT_EQ(x.grad().index_select(0, ids({1, 3, 4}, {3})).abs().max().item<double>(), 0.0);
}

TEST(LinearCrossEntropy, WithoutGradModeNoBufferIsTouched) {
  Parameter weight = make_parameter("head", {11, 4}, at::kFloat);
  weight.grad.copy_(random_tensor("before", {11, 4}, at::kFloat));
  const Tensor before = weight.grad.clone();
  const Tensor hidden = random_tensor("hidden", {9, 4}, at::kFloat);
  at::NoGradGuard no_grad;
  const auto result = linear_cross_entropy(hidden, weight, some_labels(9, 11), 1.0);
  EXPECT_FALSE(result.loss.requires_grad());
  EXPECT_TRUE(at::equal(weight.grad, before));
}

TEST(LinearCrossEntropy, LossMustBeARoot) {
  Parameter weight = make_parameter("head", {11, 4}, at::kFloat);
  Tensor hidden = random_tensor("hidden", {9, 4}, at::kFloat).set_requires_grad(true);
  const Tensor loss = linear_cross_entropy(hidden, weight, some_labels(9, 11), 1.0).loss;
  EXPECT_TRUE(contains(error_text([&] { (loss * 2).backward(); }), "got the gradient 2"));
}

TEST(LinearCrossEntropy, LargeLogitsStayFinite) {
  Parameter weight = make_parameter("head", {4, 1}, at::kFloat);
  {
    at::NoGradGuard no_grad;
    weight.value.copy_(values({1000, -1000, 999, 0}, {4, 1}));
  }
  const auto result = linear_cross_entropy(values({1, 1}, {2, 1}), weight, ids({0, 1}, {2}), 1.0);
  EXPECT_NEAR(list<float>(result.logprobs)[0], -std::log1p(std::exp(-1.0)), 1e-6);
  EXPECT_NEAR(list<float>(result.logprobs)[1], -2000.3133, 1e-2);
  EXPECT_TRUE(std::isfinite(weight.grad.sum().item<float>()));
}

TEST(LinearCrossEntropy, NamesWhatDoesNotFit) {
  Parameter weight = make_parameter("head", {11, 4}, at::kFloat);
  const Tensor hidden = at::zeros({3, 4}), labels = ids({0, 11, 2}, {3});
  auto error = [&](const Tensor& h, const Tensor& l) {
    return error_text([&] { linear_cross_entropy(h, weight, l, 1.0); });
  };
  EXPECT_TRUE(contains(error(hidden, labels), "labels[1] = 11"));
  EXPECT_TRUE(contains(error(hidden, labels.narrow(0, 0, 2)), "labels"));
  EXPECT_TRUE(contains(error(hidden.to(at::kBFloat16), labels), "hidden"));
  EXPECT_TRUE(contains(error(at::zeros({3, 5}), labels), "hidden"));
}

} // namespace
} // namespace pith::test
