#include "operators/ring_attention.h"
#include "tests/gpu/gpu_check.h"
#include "tests/operators/spans.h"

namespace pith::test {
namespace {
struct Case {
  std::vector<int32_t> cu;
  int64_t heads, plain, shared, v_dim, rank;
};

// Latents of DeepSeek-V2-Lite over documents and over equal rows, and odd sizes.
TEST(LatentAttentionGpu, MatchesTheReference) {
  const Case cases[] = {{{0, 130, 131, 400}, 16, 128, 64, 128, 512},
    {{0, 256, 512}, 16, 128, 64, 128, 512}, {{0, 9, 17}, 3, 10, 6, 7, 20}};
  for (const Case& c: cases) {
    const int64_t tokens = c.cu.back();
    const std::vector<Tensor> inputs{random_tensor("q", {tokens, c.heads, c.plain + c.shared}),
      random_tensor("latent", {tokens, c.rank}), random_tensor("rotary_key", {tokens, c.shared})};
    const Tensor up = random_tensor("up", {c.heads * (c.plain + c.v_dim), c.rank}, at::kDouble,
      1 / std::sqrt(static_cast<double>(c.rank)));
    const Operator attend = [&](const std::vector<Tensor>& x, std::vector<Parameter>& w) {
      return latent_attention(
        x[0], x[1], x[2], w[0], c.v_dim, whole_ring(make_span(c.cu, x[0].device()), tokens), 0.1);
    };
    for (const at::ScalarType dtype: {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(fmt::format("{} tokens, {}", tokens, dtype_name(dtype)));
      std::vector<Tensor> x;
      for (const Tensor& input: inputs) x.push_back(input.to(dtype));
      const Tensor cotangent = random_tensor("cotangent", {tokens, c.heads, c.v_dim}, dtype);
      const auto exact = run_operator(attend, x, {up.to(dtype)}, at::kDouble, at::kCPU, cotangent);
      poison();
      const auto got = run_operator(attend, x, {up.to(dtype)}, dtype, kGpu, cotangent);
      for (size_t i = 0; i < exact.tensors.size(); ++i) {
        // In BF16 keys, values and their gradients are rounded on the way.
        expect_close(
          got.tensors[i], exact.tensors[i], dtype == at::kFloat ? 2e-5 : 0.02, exact.names[i]);
      }
    }
  }
}

} // namespace
} // namespace pith::test
