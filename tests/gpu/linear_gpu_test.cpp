#include "operators/linear.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
// Noise: FP32 sums of up to 2048 products; cuBLAS' order differs from the CPU's.
TEST(LinearGpu, AgreesWithCpu) {
  struct Shape {
    int64_t tokens, in, out;
  };
  for (const Shape& s: {Shape{1, 1, 1}, {2, 3, 5}, {3, 64, 32}, {0, 16, 8}, {1, 2048, 128},
         {257, 130, 66}, {515, 2048, 128}, {128, 96, 513}}) {
    SCOPED_TRACE(fmt::format("{} {} {}", s.tokens, s.in, s.out));
    const Tensor x = random_tensor("x", {s.tokens, s.in}), w = random_tensor("w", {s.out, s.in});
    check_on_gpu([](const auto& in, auto& weights) { return linear(in[0], weights[0]); }, {x}, {w});
    check_on_gpu(
      [](const auto& in, auto& weights) { return linear_fp32(in[0], weights[0]); }, {x}, {w});
    const Tensor b = random_tensor("b", {s.out});
    for (const auto map: {linear, linear_fp32})
      check_on_gpu([map](const auto& in, auto& p) { return map(in[0], p[0], &p[1]); }, {x}, {w, b});
  }
}

// The FP32 result of BF16 inputs and its weight gradient keep FP32's digits (three BF16 parts).
TEST(LinearGpu, Fp32BackwardOfBFloat16) {
  Parameter w = make_parameter("w", {128, 256}, at::kBFloat16);
  const Tensor w64 = w.value.detach().to(at::kDouble);
  w.value = w.value.detach().to(kGpu).set_requires_grad(true);
  w.grad = w.grad.to(kGpu);
  const Tensor x = random_tensor("x", {300, 256}, at::kBFloat16);
  const Tensor dy = random_tensor("dy", {300, 128}, at::kFloat, 1e-3);
  linear_fp32(x.to(kGpu), w).backward(dy.to(kGpu));
  EXPECT_LE(
    relative_difference(w.grad.cpu(), dy.to(at::kDouble).t().matmul(x.to(at::kDouble))), 2e-6);
}

} // namespace
} // namespace pith::test
