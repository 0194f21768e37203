#include "operators/ring_attention.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
// Two parts of the keys, the second for some rows only; sums in BF16, as two ranks have, and FP32.
TEST(RingAttentionGpu, MergesParts) {
  for (const int64_t dim: {128, 20, 7}) {
    for (const bool indexed: {false, true}) {
      constexpr int64_t kTokens = 300, kHeads = 6, kFirst = 33, kCount = 101;
      RowSet rows{kFirst, kCount, {}};
      if (indexed) rows.index = at::arange(kCount, at::kLong) * 2 + 7;
      const auto part = [&](const char* name, int64_t tokens) {
        return AttentionPart{random_tensor(name, {tokens, kHeads, dim}).to(at::kBFloat16),
          random_tensor("lse", {tokens, kHeads, 1}, at::kFloat)};
      };
      const AttentionPart whole = part("whole", kTokens), other = part("other", kCount);
      for (const at::ScalarType sums: {at::kBFloat16, at::kFloat}) {
        const auto merged = [&](at::ScalarType dtype, at::ScalarType lse, at::Device device) {
          AttentionPart sum{
            whole.out.to(device, dtype, false, true), whole.lse.to(device, lse, false, true)};
          RowSet there = rows;
          if (indexed) there.index = rows.index.to(device);
          const auto type = device.is_cuda() ? at::kBFloat16 : dtype;
          merge(sum, there, {other.out.to(device, type), other.lse.to(device, lse)});
          return sum;
        };
        const AttentionPart exact = merged(at::kDouble, at::kDouble, at::kCPU);
        const AttentionPart got = merged(sums, at::kFloat, kGpu);
        const std::string name = fmt::format("dim {}, {}", dim, dtype_name(sums));
        expect_close(got.out, exact.out, 1e-6, name);
        expect_close(got.lse, exact.lse, 1e-6, name);
      }
    }
  }
}

} // namespace
} // namespace pith::test
