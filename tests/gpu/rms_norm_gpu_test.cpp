#include "operators/rms_norm.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
// Noise: FP32 sums over a row, and over up to 131 rows for the weight.
TEST(RmsNormGpu, AgreesWithCpu) {
  for (int64_t dim: {1, 2, 7, 16, 64, 100, 127, 128, 136, 192, 256, 257, 512, 520, 768, 1000, 1024,
         2048, 2051, 2880, 4096, 7168, 8191, 8192}) {
    for (int64_t rows: {0, 1, 3, 131}) {
      SCOPED_TRACE(fmt::format("{} rows of {}", rows, dim));
      // In very short rows the gradient is all cancellation unless eps matters.
      const double eps = dim < 4 ? 1e-2 : 1e-6;
      check_on_gpu([eps](const auto& in, auto& w) { return rms_norm(in[0], w[0], eps); },
        {random_tensor("x", {rows, dim})}, {random_tensor("w", {dim}, at::kDouble, 0.3) + 1});
    }
  }
}

TEST(RmsNormGpu, ZeroCentred) {
  for (const int64_t dim: {7, 256, 2048, 2051})
    check_on_gpu([](const auto& in, auto& w) { return rms_norm(in[0], w[0], 1e-6, true); },
      {random_tensor("x", {131, dim})}, {random_tensor("w", {dim}, at::kDouble, 0.01)});
}

// Heads inside a fused projection (T, 3 heads of D), aligned and not.
TEST(RmsNormGpu, StridedHeads) {
  for (int64_t dim: {64, 128, 129}) {
    SCOPED_TRACE(dim);
    const auto k_heads = [dim](const auto& in, auto& w) {
      return rms_norm(in[0].view({33, 7, dim}).narrow(1, 2, 3), w[0], 1e-6);
    };
    const auto columns = [dim](const auto& in, auto& w) {
      return rms_norm(in[0].narrow(1, 1, dim), w[0], 1e-6);
    };
    const Tensor x = random_tensor("x", {33, 7 * dim}), w = random_tensor("w", {dim});
    check_on_gpu(k_heads, {x}, {w});
    check_on_gpu(columns, {x}, {w});
  }
}

// More rows than the backward's blocks take at once; noise: FP32 sums of 60,000 terms in a fixed
// tree.
TEST(RmsNormGpu, ManyShortRows) {
  check_on_gpu([](const auto& in, auto& w) { return rms_norm(in[0], w[0], 1e-6); },
    {random_tensor("x", {20'003, 3, 128})}, {random_tensor("w", {128})}, 3e-5);
}

// Elements past 2^31: sampled rows against the CPU.
TEST(RmsNormGpu, LargeTensor) {
  const int64_t dim = 128, rows = (int64_t{1} << 31) / dim + 1000;
  at::Tensor x = at::empty({rows, dim}, at::TensorOptions().dtype(at::kBFloat16).device(kGpu));
  fill_normal(x, 1, "x", 1.0);
  x.set_requires_grad(true);
  Parameter w = make_parameter("w", {dim}, at::kBFloat16),
            cpu = make_parameter("w", {dim}, at::kBFloat16);
  w.value = w.value.detach().to(kGpu).set_requires_grad(true);
  w.grad = w.grad.to(kGpu);
  const Tensor y = rms_norm(x, w, 1e-6);
  y.backward(y.detach());
  for (int64_t r: {int64_t{0}, rows / 2, rows - 1000, rows - 1}) {
    const Tensor row = x.detach()[r].cpu().set_requires_grad(true);
    const Tensor expected = rms_norm(row, cpu, 1e-6);
    expected.backward(expected.detach());
    expect_close(y[r], expected, 0x1p-8, "row");
    expect_close(x.grad()[r], row.grad(), 0x1p-7, "gradient of row");
  }
}

} // namespace
} // namespace pith::test
