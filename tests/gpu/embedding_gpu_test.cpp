#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include "operators/embedding.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
// Noise: FP32 sums of up to 3000 rows.
TEST(EmbeddingGpu, AgreesWithCpu) {
  const auto longs = at::TensorOptions().dtype(at::kLong);
  const Tensor mixed = (at::arange(1023, longs) * 7919) % 37;
  std::vector<Tensor> cases = {
    at::zeros({0}, longs), at::full({1}, 36, longs), mixed, mixed % 2, at::arange(37, longs)};
  for (int64_t run: {7, 8, 9, 16, 17, 3000}) cases.push_back(at::full({run}, 5, longs));
  for (int64_t hidden: {1, 3, 64, 516, 2048}) {
    for (const Tensor& tokens: cases) {
      SCOPED_TRACE(fmt::format("hidden {}, {} tokens", hidden, tokens.numel()));
      check_on_gpu([](const auto& in, auto& w) { return embedding(in[0], w[0]); }, {tokens},
        {random_tensor("w", {37, hidden})});
    }
  }
}

// Elements of the table past 2^31.
TEST(EmbeddingGpu, LargeTable) {
  const int64_t rows = (int64_t{1} << 31) / 2048 + 100, hidden = 2048;
  Parameter w("w", {rows, hidden}, ParameterGroup::embedding, Init::zeros);
  allocate(w, at::kBFloat16, kGpu);
  const Tensor marked = random_tensor("row", {hidden}, at::kBFloat16).to(kGpu);
  w.value.detach()[rows - 3].copy_(marked);
  const Tensor tokens = at::tensor(std::vector<int64_t>{rows - 3, 0, rows - 3}, at::kLong).to(kGpu);
  const Tensor y = embedding(tokens, w);
  EXPECT_TRUE(at::equal(y[0], marked) && at::equal(y[2], marked));
  EXPECT_EQ(y[1].abs().max().item<double>(), 0.0);
  y.backward(at::full({3, hidden}, 1.0, y.options()));
  EXPECT_EQ(max_difference(w.grad[rows - 3], at::full({hidden}, 2.0)), 0.0);
  EXPECT_EQ(max_difference(w.grad[0], at::full({hidden}, 1.0)), 0.0);
}

} // namespace
} // namespace pith::test
