#include "core/random.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
// Up to 6.8 standard deviations; log, sin and cos differ in their last digits.
TEST(RandomGpu, AgreesWithCpu) {
  for (int64_t n: {0, 1, 3, 4, 5, 1'000'003}) {
    for (int64_t first: {0, 1, 2, 3, 1'000'001}) {
      Tensor cpu = at::empty({n}, at::kFloat),
             gpu = at::empty({n}, at::TensorOptions().device(kGpu));
      gpu.fill_(std::nan(""));
      fill_normal(cpu, 5, "w", 0.02, first);
      fill_normal(gpu, 5, "w", 0.02, first);
      EXPECT_LE(max_difference(gpu, cpu), 2e-8) << n << " from " << first;
      Tensor bf16 = at::empty({n}, gpu.options().dtype(at::kBFloat16));
      fill_normal(bf16, 5, "w", 0.02, first);
      EXPECT_TRUE(at::equal(bf16, gpu.to(at::kBFloat16)));
    }
  }
}

TEST(RandomGpu, IndicesPast32Bits) {
  const int64_t n = (int64_t{1} << 31) + 4097;
  Tensor whole = at::empty({n}, at::TensorOptions().dtype(at::kBFloat16).device(kGpu));
  fill_normal(whole, 5, "w", 1.0);
  Tensor tail = at::empty({999}, whole.options());
  fill_normal(tail, 5, "w", 1.0, n - 999);
  EXPECT_TRUE(at::equal(whole.narrow(0, n - 999, 999), tail));
}

} // namespace
} // namespace pith::test
