#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include "operators/rotary.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
Tensor rotate(const Tensor& x, const Tensor& positions) {
  const RotaryTable table = make_rotary_table(5000, x.size(2), 1e6, x.device());
  return rotary(x, positions, table);
}

// Noise: two FP32 products and a difference.
TEST(RotaryGpu, AgreesWithCpu) {
  for (int64_t dim: {2, 6, 16, 64, 128, 192}) {
    for (int64_t heads: {1, 2, 3, 12, 40}) {
      for (int64_t tokens: {0, 1, 2, 133}) {
        SCOPED_TRACE(fmt::format("{} {} {}", tokens, heads, dim));
        const Tensor positions = ((at::arange(tokens) * 37) % 5000).to(at::kInt);
        check_on_gpu([](const auto& in, auto&) { return rotate(in[0], in[1]); },
          {random_tensor("x", {tokens, heads, dim}), positions}, {}, 1e-6);
      }
    }
  }
}

TEST(RotaryGpu, StridedHeads) {
  for (int64_t dim: {128, 34}) {
    const auto k_heads = [dim](const auto& in, auto&) {
      return rotate(in[0].view({33, 7, dim}).narrow(1, 2, 3), in[1]);
    };
    check_on_gpu(
      k_heads, {random_tensor("x", {33, 7 * dim}), at::arange(33).to(at::kInt)}, {}, 1e-6);
    const auto columns = [dim](const auto& in, auto&) {
      return rotate(in[0].narrow(1, 1, 3 * dim).view({33, 3, dim}), in[1]);
    };
    check_on_gpu(
      columns, {random_tensor("x", {33, 7 * dim}), at::arange(33).to(at::kInt)}, {}, 1e-6);
  }
}

TEST(RotaryGpu, PartOfAHead) {
  for (const int64_t dim: {64, 256, 65})
    check_on_gpu([](const auto& in, auto&) {
      return rotary(in[0], in[1], make_rotary_table(5000, 64, 1e7, in[0].device()));
    }, {random_tensor("x", {133, 3, dim}), at::arange(133).to(at::kInt)}, {}, 1e-6);
}

// Pairs of neighbours, behind elements that are only copied; vectors of 8, 4, 2 and 1.
TEST(RotaryGpu, NeighboursBehindPlainElements) {
  for (const int64_t first: {0, 8, 13, 128}) {
    for (const int64_t dim: {2, 6, 16, 64}) {
      for (const int64_t heads: {1, 3, 16}) {
        SCOPED_TRACE(fmt::format("{} + {}, {} heads", first, dim, heads));
        const auto turn = [&](const auto& in, auto&) {
          const RotaryTable table = make_rotary_table(5000, dim, 1e4, in[0].device());
          const Tensor view = in[0].narrow(1, 3, heads * (first + dim));
          return rotary(
            view.view({-1, heads, first + dim}), in[1], table, RotaryPairs::neighbours, first);
        };
        const Tensor positions = ((at::arange(133) * 37) % 5000).to(at::kInt);
        check_on_gpu(
          turn, {random_tensor("x", {133, heads * (first + dim) + 5}), positions}, {}, 1e-6);
        const auto halves = [&](const auto& in, auto&) {
          const RotaryTable table = make_rotary_table(5000, dim, 1e4, in[0].device());
          return rotary(in[0], in[1], table, RotaryPairs::halves, first);
        };
        check_on_gpu(halves, {random_tensor("x", {133, heads, first + dim}), positions}, {}, 1e-6);
      }
    }
  }
}

TEST(RotaryGpu, PositionOutsideTheTableIsNaN) {
  const RotaryTable table = make_rotary_table(4, 16, 1e4, kGpu);
  const Tensor x = random_tensor("x", {3, 2, 16}, at::kFloat).to(kGpu);
  const Tensor y = rotary(x, at::tensor(std::vector<int32_t>{3, 4, -1}, at::kInt).to(kGpu), table);
  const Tensor nan = y.isnan().flatten(1).cpu();
  EXPECT_FALSE(nan[0].any().item<bool>());
  EXPECT_TRUE(nan[1].all().item<bool>());
  EXPECT_TRUE(nan[2].all().item<bool>());
}

// Elements past 2^31: sampled tokens against the CPU.
TEST(RotaryGpu, LargeTensor) {
  const int64_t heads = 32, dim = 128, tokens = (int64_t{1} << 31) / (heads * dim) + 100;
  Tensor x = at::empty({tokens, heads, dim}, at::TensorOptions().dtype(at::kBFloat16).device(kGpu));
  fill_normal(x, 1, "x", 1.0);
  const Tensor positions = (at::arange(tokens) % 5000).to(at::kInt).to(kGpu);
  const Tensor y = rotate(x, positions);
  for (int64_t t: {int64_t{0}, tokens / 2, tokens - 101, tokens - 1}) {
    const Tensor expected =
      rotate(x.narrow(0, t, 1).cpu().to(at::kDouble), positions.narrow(0, t, 1).cpu());
    expect_close(y.narrow(0, t, 1), expected, 1e-6, "token");
  }
}

} // namespace
} // namespace pith::test
