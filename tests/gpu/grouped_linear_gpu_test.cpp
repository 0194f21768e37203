#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include "operators/grouped_linear.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
struct Case {
  std::vector<int64_t> counts;
  int64_t in, out;
};
// Sizes that _grouped_mm takes and sizes that it does not (rows of 16-byte multiples).
const Case kCases[] = {{{0, 1, 127, 128, 129, 0}, 64, 48}, {{300, 0, 0}, 128, 264}, {{1}, 8, 8},
  {{3, 0, 2}, 17, 33}, {{0, 0}, 16, 16}, {{5, 70}, 24, 31},
  // The weight-gradient kernel: whole and cut tiles, steps of 64 rows and their ends, no rows.
  // The product kernel: tiles of 128 rows and 256 columns, whole, cut, and of one row.
  {{700, 129, 0, 5, 128}, 72, 328}, {{64, 0, 200, 63, 65, 1}, 256, 128}, {{128, 1, 500}, 264, 136},
  {{0, 320, 7}, 520, 392}, {{300, 0, 0}, 128, 272}, {{0, 320, 7}, 520, 416},
  {{700, 129, 0, 5, 128}, 72, 336}};

TEST(GroupedLinearGpu, MatchesTheReference) {
  for (const Case& c: kCases) {
    SCOPED_TRACE(fmt::format("rows {}, {} -> {}", fmt::join(c.counts, " "), c.in, c.out));
    std::vector<Tensor> parts;
    for (size_t e = 0; e < c.counts.size(); ++e) {
      parts.push_back(at::full({c.counts[e], 1}, static_cast<int64_t>(e), at::kLong));
    }
    const Tensor idx = at::cat(parts);
    const auto num_experts = static_cast<int64_t>(c.counts.size());
    check_on_gpu([&](const std::vector<Tensor>& x, std::vector<Parameter>& p) {
      return grouped_linear(x[0], p[0], make_expert_plan(idx.to(x[0].device()), num_experts));
    }, {random_tensor("x", {idx.size(0), c.in})}, {random_tensor("w", {num_experts, c.out, c.in})});
    const Tensor x = random_tensor("x", {idx.size(0), c.in});
    const std::vector<Tensor> weights{
      random_tensor("w", {num_experts, c.in, c.out}), random_tensor("b", {num_experts, c.out})};
    const auto affine = [&](const std::vector<Tensor>& in, std::vector<Parameter>& p) {
      const ExpertPlan plan = make_expert_plan(idx.to(in[0].device()), num_experts);
      return grouped_affine(in[0], p[0], p[1], plan);
    };
    // The reference rounds the product before the bias is added: a second half unit.
    check_on_gpu(affine, {x}, weights, 0x1p-8);
  }
}

// The results of its parts, bit for bit: listed rows and the activation beside the products change
// no sum. Gradients have the same kernels. In BF16 where a kernel takes both; in FP32 none does.
TEST(GroupedLinearGpu, PermutedSwigluEqualsItsParts) {
  for (const Case& c: kCases) {
    if (c.out % 2 != 0) continue;
    SCOPED_TRACE(fmt::format("rows {}, {} -> {}", fmt::join(c.counts, " "), c.in, c.out));
    std::vector<Tensor> parts;
    for (size_t e = 0; e < c.counts.size(); ++e)
      parts.push_back(at::full({c.counts[e], 1}, static_cast<int64_t>(e), at::kLong));
    const Tensor idx = at::cat(parts);
    const auto experts = static_cast<int64_t>(c.counts.size());
    const ExpertPlan plan = make_expert_plan(at::cat({idx, idx.flip(0)}, 1).to(kGpu), experts);
    const SwigluForm form{1.702f, 6, 1, true};
    for (const bool affine: {false, true}) {
      const Operator fused = [&](const auto& x, auto& p) {
        return affine ? permuted_swiglu(x[0], p[0], plan, form, &p[1])
                      : permuted_swiglu(x[0], p[0], plan);
      };
      const Operator composed = [&](const auto& x, auto& p) {
        const Tensor rows = permute(x[0], plan);
        return affine ? swiglu(grouped_affine(rows, p[0], p[1], plan), form)
                      : swiglu(grouped_linear(rows, p[0], plan));
      };
      const std::vector<Tensor> x{random_tensor("x", {idx.size(0), c.in})};
      std::vector<Tensor> w{random_tensor("w", {experts, c.out, c.in})};
      if (affine) w = {w[0].transpose(1, 2).contiguous(), random_tensor("b", {experts, c.out})};
      for (const auto dtype: {at::kFloat, at::kBFloat16}) {
        if (dtype == at::kBFloat16 && c.out % 16 != 0) continue;
        const Tensor cotangent = random_tensor("dy", {plan.num_slots(), c.out / 2}, dtype);
        poison();
        const Outcome a = run_operator(fused, x, w, dtype, kGpu, cotangent);
        const Outcome b = run_operator(composed, x, w, dtype, kGpu, cotangent);
        for (size_t i = 0; i < a.tensors.size(); ++i)
          EXPECT_TRUE(at::equal(a.tensors[i], b.tensors[i])) << affine << a.names[i];
      }
    }
  }
}

// Blocks finish in any order; results and gradients must not show it.
TEST(GroupedLinearGpu, HundredRunsAreIdentical) {
  const int64_t experts = 16, rows = 3000, in = 512, out = 768;
  const Tensor idx = (at::arange(rows * 4, at::kLong) * 7919).remainder(977).remainder(experts);
  const ExpertPlan plan = make_expert_plan(idx.view({rows, 4}).to(kGpu), experts);
  const Operator layer = [&](const auto& x, auto& p) {
    return unpermute(grouped_linear(permuted_swiglu(x[0], p[0], plan), p[1], plan), x[1], plan);
  };
  const std::vector<Tensor> x{random_tensor("x", {rows, in})};
  const Tensor weight = random_tensor("weight", {rows, 4}, at::kFloat).to(kGpu);
  const std::vector<Tensor> w{
    random_tensor("up", {experts, out, in}), random_tensor("down", {experts, in, out / 2})};
  const Operator weighted = [&](const auto& rows_of, auto& p) {
    return layer({rows_of[0], weight}, p);
  };
  const Tensor cotangent = random_tensor("dy", {rows, in}, at::kBFloat16);
  const Outcome first = run_operator(weighted, x, w, at::kBFloat16, kGpu, cotangent);
  for (int run = 1; run < 100; ++run) {
    const Outcome again = run_operator(weighted, x, w, at::kBFloat16, kGpu, cotangent);
    for (size_t i = 0; i < first.tensors.size(); ++i)
      ASSERT_TRUE(at::equal(first.tensors[i], again.tensors[i])) << run << ": " << first.names[i];
  }
}

} // namespace
} // namespace pith::test
