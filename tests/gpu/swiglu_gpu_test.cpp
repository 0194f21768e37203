#include <ATen/ops/tensor.h>
#include "operators/swiglu.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
SwigluForm clamped(double alpha, double limit) { return {float(alpha), float(limit), 1, true}; }

// Noise: the kernel's fast exponential and division are right to about 1e-6.
TEST(SwiGluGpu, AgreesWithCpu) {
  for (int64_t width: {1, 3, 8, 20, 768, 1000, 1024, 2881, 4104}) {
    for (int64_t rows: {0, 1, 2, 3, 131}) {
      SCOPED_TRACE(fmt::format("{} rows of {}", rows, width));
      const Tensor x = random_tensor("x", {rows, 2 * width}, at::kDouble, 3.0);
      check_on_gpu([](const auto& in, auto&) { return swiglu(in[0]); }, {x}, {});
      // A limit that no input of either dtype equals.
      check_on_gpu(
        [](const auto& in, auto&) { return swiglu(in[0], clamped(1.702, 2.512345)); }, {x}, {});
    }
  }
}

TEST(SwiGluGpu, ExtremeGates) {
  const Tensor x = at::tensor({-200.0f, 200.0f, -90.0f, 2.0f, 3.0f, 4.0f}).view({1, 6}).to(kGpu);
  x.set_requires_grad(true);
  const Tensor y = swiglu(x);
  y.sum().backward();
  EXPECT_LE(max_difference(y, at::tensor({0.0, 600.0, 0.0}).view({1, 3})), 1e-30);
  EXPECT_LE(
    max_difference(x.grad(), at::tensor({0.0, 3.0, 0.0, 0.0, 200.0, 0.0}).view({1, 6})), 1e-30);
}

// Elements past 2^31: sampled rows against the CPU.
TEST(SwiGluGpu, LargeTensor) {
  const int64_t width = 768, rows = (int64_t{1} << 31) / (2 * width) + 1000;
  Tensor x = at::empty({rows, 2 * width}, at::TensorOptions().dtype(at::kBFloat16).device(kGpu));
  fill_normal(x, 1, "x", 1.0);
  x.set_requires_grad(true);
  const Tensor y = swiglu(x);
  y.backward(y.detach());
  for (int64_t r: {int64_t{0}, rows / 2, rows - 1000, rows - 1}) {
    const Tensor row = x.detach().narrow(0, r, 1).cpu().to(at::kDouble).set_requires_grad(true);
    const Tensor expected = swiglu(row);
    expected.backward(y.detach().narrow(0, r, 1).cpu().to(at::kDouble));
    expect_close(y.narrow(0, r, 1), expected, 1e-5, "row");
    expect_close(x.grad().narrow(0, r, 1), row.grad(), 1e-5, "gradient of row");
  }
}

} // namespace
} // namespace pith::test
