#include "operators/embedding.h"
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include "tests/operators/gradient_check.h"

namespace pith::test {
namespace {
Tensor token_ids(std::vector<int64_t> values) { return at::tensor(values, at::kLong); }

TEST(Embedding, GradientsMatchFiniteDifferences) {
  const std::vector<std::vector<int64_t>> cases = {
    {0}, {4}, {1, 1, 1, 1}, {3, 0, 3, 2, 0, 3}, {0, 1, 2, 3, 4}, {}};
  for (const auto& tokens: cases) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(tokens, " ")));
    Parameter w = make_parameter("w", {5, 3});
    check_gradients([&] { return embedding(token_ids(tokens), w); }, {}, {&w});
    EXPECT_TRUE(
      at::equal(embedding(token_ids(tokens), w), w.value.index_select(0, token_ids(tokens))));
  }
}

// Equal tokens are summed in FP32: 1 + 300 * 2^-8 is lost where sums are BF16. Hidden above one
// task.
TEST(Embedding, SumsBFloat16RowsInFp32) {
  Parameter w = make_parameter("w", {2, 131}, at::kBFloat16);
  const Tensor tokens = at::full({301}, 1, at::TensorOptions().dtype(at::kLong));
  Tensor dy = at::full({301, 131}, 0x1p-8, at::TensorOptions().dtype(at::kBFloat16));
  dy[0].fill_(1.0);
  embedding(tokens, w).backward(dy);
  EXPECT_EQ(max_difference(w.grad[1], at::full({131}, 1.0 + 300 * 0x1p-8)), 0.0);
  EXPECT_EQ(w.grad[0].abs().max().item<double>(), 0.0);
}

TEST(Embedding, Refuses) {
  Parameter w = make_parameter("model.embed_tokens.weight", {5, 3});
  EXPECT_THROW(embedding(token_ids({0, 5}), w), Error);
  EXPECT_THROW(embedding(token_ids({-1}), w), Error);
  EXPECT_THROW(embedding(token_ids({1}).to(at::kInt), w), Error);
  EXPECT_THROW(embedding(token_ids({1, 2}).view({1, 2}), w), Error);
}

} // namespace
} // namespace pith::test
