#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include "operators/adamw.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
// Three steps on the CPU, in FP64 or with BF16 moments, and on CUDA; `offset` moves the tensors off
// 16-byte addresses.
void compare(
  int64_t n, int64_t offset, at::ScalarType value_dtype, at::ScalarType moments = at::kFloat) {
  SCOPED_TRACE(fmt::format("{} elements from {}, {}, moments {}", n, offset,
    dtype_name(value_dtype), dtype_name(moments)));
  const bool half = moments == at::kBFloat16;
  const at::ScalarType exact = half ? at::kFloat : at::kDouble;
  const auto make = [&](const char* name, double std) {
    return random_tensor(name, {n + offset}, at::kFloat, std);
  };
  const auto cut = [&](const Tensor& t) { return t.narrow(0, offset, n); };
  const Tensor start = make("master", 1.0);
  Tensor w64 = cut(start).to(exact, false, true), value64 = w64.clone();
  Tensor m64 = at::zeros_like(w64).to(half ? moments : exact), v64 = m64.clone();
  Tensor w = start.to(kGpu), m = at::zeros_like(w).to(moments), v = m.clone();
  Tensor value = at::full_like(w, std::nan("")).to(value_dtype);
  const Tensor scale = at::scalar_tensor(0.5f);
  for (int64_t step = 1; step <= 3; ++step) {
    const AdamWStep settings{1e-2, 0.9, 0.95, 1e-8, 0.1, step};
    const Tensor grad = make(("grad" + std::to_string(step)).c_str(), 1e-3);
    adamw_update(w64, m64, v64, cut(grad).to(exact), value64, scale.to(exact), settings);
    Tensor w_part = cut(w), m_part = cut(m), v_part = cut(v), value_part = cut(value);
    adamw_update(w_part, m_part, v_part, cut(grad.to(kGpu)), value_part, scale.to(kGpu), settings);
  }
  // Where FP32 sums differ in the last bit, a BF16 moment may be rounded the other way.
  expect_close(cut(w), w64, half ? 1e-4 : 2e-6, "master");
  expect_close(cut(m), m64, half ? 4e-3 : 1e-6, "exp_avg");
  expect_close(cut(v), v64, half ? 4e-3 : 1e-6, "exp_avg_sq");
  EXPECT_TRUE(at::equal(cut(value), cut(w).to(value_dtype))) << "value is the rounded master";
  EXPECT_TRUE(at::equal(w.narrow(0, 0, offset).cpu(), start.narrow(0, 0, offset)));
}

TEST(AdamWGpu, AgreesWithCpu) {
  for (int64_t n: {1, 2, 3, 4, 5, 1023, 1024, 1025, 100'003}) {
    for (int64_t offset: {0, 1, 2, 4}) {
      compare(n, offset, at::kFloat);
      compare(n, offset, at::kBFloat16);
      compare(n, offset, at::kBFloat16, at::kBFloat16);
      compare(n, offset, at::kFloat, at::kBFloat16);
    }
  }
}

// The number of shards doesn't change bits: the vector path and the tail round alike.
TEST(AdamWGpu, ShardsEqualTheWhole) {
  const int64_t n = 40'001;
  const auto run = [&](std::vector<int64_t> borders) {
    Tensor w = random_tensor("w", {n}, at::kFloat).to(kGpu), m = at::zeros_like(w);
    Tensor v = at::zeros_like(w), value = at::zeros_like(w).to(at::kBFloat16);
    const Tensor grad = random_tensor("g", {n}, at::kFloat).to(kGpu);
    const Tensor scale = at::ones({}, w.options());
    for (size_t i = 1; i < borders.size(); ++i) {
      const auto cut = [&](const Tensor& t) {
        return t.narrow(0, borders[i - 1], borders[i] - borders[i - 1]);
      };
      Tensor a = cut(w), b = cut(m), c = cut(v), d = cut(value);
      adamw_update(a, b, c, cut(grad), d, scale, {1e-3, 0.9, 0.95, 1e-8, 0.1, 1});
    }
    return w;
  };
  EXPECT_TRUE(at::equal(run({0, n}), run({0, 1, 17'002, 30'000, n})));
}

TEST(AdamWGpu, LargeShard) {
  const int64_t n = (int64_t{1} << 31) + 1001;
  const auto options = at::TensorOptions().device(kGpu);
  Tensor w = at::ones({n}, options), m = at::zeros({n}, options), v = at::zeros({n}, options);
  Tensor value = at::zeros({n}, options.dtype(at::kBFloat16));
  const Tensor grad = at::ones({n}, options), scale = at::ones({}, options);
  adamw_update(w, m, v, grad, value, scale, {0.5, 0.9, 0.95, 0.0, 0.0, 1});
  for (int64_t i: {int64_t{0}, n / 2, n - 2, n - 1}) {
    EXPECT_NEAR(w[i].item<double>(), 0.5, 1e-6);
    EXPECT_EQ(value[i].item<double>(), 0.5);
  }
  EXPECT_EQ(sum_of_squares(grad).item<double>(), static_cast<double>(n));
}

TEST(SumOfSquaresGpu, AgreesWithCpu) {
  for (int64_t n: {0, 1, 2, 3, 4, 5, 255, 1024, 1'081'343, 1'081'344, 10'000'019}) {
    for (int64_t offset: {0, 1, 3}) {
      SCOPED_TRACE(fmt::format("{} elements from {}", n, offset));
      const Tensor x = random_tensor("x", {n + offset}, at::kFloat);
      const Tensor part = x.to(kGpu).narrow(0, offset, n);
      const double expected = sum_of_squares(x.narrow(0, offset, n)).item<double>();
      const double got = sum_of_squares(part).item<double>();
      EXPECT_NEAR(got, expected, 1e-12 * expected);
      EXPECT_EQ(sum_of_squares(part).item<double>(), got);
    }
  }
}

} // namespace
} // namespace pith::test
