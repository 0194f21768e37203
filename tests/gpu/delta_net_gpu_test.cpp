#include <ATen/ops/tensor.h>
#include "operators/delta_net.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
Tensor places_of(const std::vector<int64_t>& documents) {
  std::vector<int32_t> positions;
  for (const int64_t length: documents)
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
  return at::tensor(positions, at::kInt);
}

// Documents longer and shorter than a chunk and than the convolution, sizes of Qwen3.5 and odd
// ones. Noise: FP32 products over a chunk, states over several.
TEST(DeltaNetGpu, AgreesWithCpu) {
  struct Sizes {
    int64_t key_heads, heads, dk, dv;
  };
  for (const Sizes& s: {Sizes{2, 4, 128, 128}, {1, 3, 7, 5}})
    for (const std::vector<int64_t>& documents:
      {std::vector<int64_t>{300, 2, 1, 64, 33}, {1}, {128}}) {
      const Tensor positions = places_of(documents);
      const int64_t tokens = positions.size(0);
      SCOPED_TRACE(fmt::format("{} tokens, {} heads of {}", tokens, s.heads, s.dk));
      check_on_gpu(
        [](const auto& in, auto& w) {
        return gated_delta_rule(in[0], in[1], in[2], {in[3], in[4], w[0], w[1]}, {in[5]});
      },
        {random_tensor("q", {tokens, s.key_heads, s.dk}),
          random_tensor("k", {tokens, s.key_heads, s.dk}),
          random_tensor("v", {tokens, s.heads, s.dv}), random_tensor("a", {tokens, s.heads}),
          random_tensor("b", {tokens, s.heads}), positions},
        {random_tensor("a_log", {s.heads}) - 2, random_tensor("dt_bias", {s.heads})}, 2e-5);
      check_on_gpu([](const auto& in, auto& w) {
        return causal_convolution(in[0].narrow(1, 1, in[0].size(1) - 1), w[0], {in[1]});
      }, {random_tensor("x", {tokens, 1 + s.dk}), positions}, {random_tensor("w", {s.dk, 1, 4})});
    }
}

} // namespace
} // namespace pith::test
