#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/matmul.h>
#include "operators/linear_cross_entropy.h"
#include "tests/gpu/gpu_check.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
struct Result {
  CrossEntropy entropy;
  Tensor dhidden, dweight;
};

// The same rounded inputs for every dtype and device. hidden and weights are such that logits
// spread by about 3. With `one_hot`, rows of hidden pick a column of the weight, so that logits are
// numbers that BF16 holds.
Result run(at::ScalarType dtype, at::Device device, at::ScalarType rounded, int64_t tokens,
  int64_t hidden_size, int64_t vocabulary, int64_t chunk, bool one_hot) {
  Parameter weight("head", {vocabulary, hidden_size}, ParameterGroup::embedding, Init::normal);
  allocate(weight, dtype, device);
  const Tensor value = random_tensor(
    "head", {vocabulary, hidden_size}, rounded, one_hot ? 3.0 : 3.0 / std::sqrt(hidden_size));
  weight.value.detach().copy_(value);
  weight.grad.fill_(0.5);
  Tensor hidden = random_tensor("hidden", {tokens, hidden_size}, rounded);
  if (one_hot) hidden = at::eye(hidden_size).index_select(0, at::arange(tokens) % hidden_size);
  hidden = hidden.to(device, dtype);
  hidden.set_requires_grad(true);
  std::vector<int64_t> labels;
  for (int64_t t = 0; t < tokens; ++t)
    labels.push_back(t % 5 == 3 ? -100 : (t * 977 + 3) % vocabulary);
  Result result;
  result.entropy =
    linear_cross_entropy(hidden, weight, ids(labels, {tokens}).to(device), 0.125, chunk);
  result.entropy.loss.backward();
  result.dhidden = hidden.grad();
  result.dweight = weight.grad;
  return result;
}

TEST(LinearCrossEntropyGpu, MatchesTheReference) {
  struct Case {
    int64_t tokens, hidden_size, vocabulary, chunk;
  };
  // Odd and even vocabularies, below and above one tile of the kernel (4096), whole and cut.
  const Case cases[] = {{1, 8, 2, 0}, {5, 24, 257, 2}, {130, 64, 1000, 0}, {33, 16, 4096, 8},
    {64, 48, 5003, 24}, {40, 32, 20004, 0}};
  for (const Case& c: cases) {
    for (const auto& [dtype, one_hot]:
      {std::pair{at::kFloat, false}, {at::kBFloat16, true}, {at::kBFloat16, false}}) {
      SCOPED_TRACE(fmt::format("{} tokens, hidden {}, vocabulary {}, {}, one_hot {}", c.tokens,
        c.hidden_size, c.vocabulary, dtype_name(dtype), one_hot));
      const auto on = [&](at::ScalarType computed, at::Device device, int64_t chunk) {
        return run(computed, device, dtype, c.tokens, c.hidden_size, c.vocabulary, chunk, one_hot);
      };
      const Result exact = on(at::kDouble, at::kCPU, 0);
      poison();
      const Result got = on(dtype, kGpu, c.chunk), again = on(dtype, kGpu, c.chunk);
      // BF16: softmax - onehot is rounded to BF16 (2^-9) before the two products; so are logits,
      // which reach 12: an error of 12 * 2^-9 in the label's and as much in the sum over all.
      const bool rounded = dtype == at::kBFloat16 && !one_hot;
      const double noise = dtype == at::kFloat ? 1e-5 : rounded ? 2e-2 : 4e-3;
      if (rounded) {
        const Tensor error = got.entropy.logprobs.cpu().to(at::kDouble) - exact.entropy.logprobs;
        EXPECT_LE(error.abs().max().item<double>(), 12 * 0x1p-8);
      } else {
        expect_close(got.entropy.logprobs, exact.entropy.logprobs, 1e-5, "logprobs");
        expect_close(got.entropy.loss, exact.entropy.loss, 1e-5, "loss");
        expect_close(got.entropy.loss_sum, exact.entropy.loss_sum, 1e-5, "loss_sum");
      }
      expect_close(got.dhidden, exact.dhidden, noise, "gradient of hidden");
      expect_close(got.dweight - 0.5, exact.dweight - 0.5, noise + 1e-5, "gradient of weight");
      EXPECT_TRUE(at::equal(got.entropy.logprobs, again.entropy.logprobs));
      EXPECT_TRUE(at::equal(got.dhidden, again.dhidden));
      EXPECT_TRUE(at::equal(got.dweight, again.dweight));
    }
  }
}

TEST(LinearCrossEntropyGpu, WithoutGradModeNoBufferIsTouched) {
  Parameter weight("head", {1001, 16}, ParameterGroup::embedding, Init::normal);
  allocate(weight, at::kBFloat16, kGpu);
  weight.value.detach().copy_(random_tensor("head", {1001, 16}, at::kBFloat16));
  weight.grad.fill_(0.25);
  const Tensor hidden = random_tensor("hidden", {7, 16}, at::kBFloat16).to(kGpu);
  const Tensor labels = ids({0, 1, -100, 1000, 5, 1001, -3}, {7}).to(kGpu);
  const at::NoGradGuard no_grad;
  const auto logprobs = list<float>(linear_cross_entropy(hidden, weight, labels, 1.0).logprobs);
  EXPECT_EQ(logprobs[2], 0.0f);
  EXPECT_TRUE(
    std::isnan(logprobs[5]) && std::isnan(logprobs[6])); // neither -100 nor in the vocabulary
  EXPECT_TRUE(at::equal(weight.grad, at::full_like(weight.grad, 0.25)));
  const Tensor logits =
    at::matmul(hidden.cpu().to(at::kDouble), weight.value.cpu().to(at::kDouble).t());
  expect_close(head_logits(hidden, weight), logits, 1e-5, "head_logits");
  const double largest = logits[3].abs().max().item<double>(); // rounded to BF16
  EXPECT_NEAR(logprobs[3], logits.log_softmax(1)[3][1000].item<double>(), largest * 0x1p-8);
}

} // namespace
} // namespace pith::test
