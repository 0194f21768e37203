// Rows to their experts and back, forward and backward, with any number of rows on each rank.
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>
#include "engine/expert_parallel.h"
#include "tests/engine/tiny_model.h"
#include "tests/operators/values.h"
#include "tests/parallel/world.h"

namespace pith::test {
namespace {
constexpr int64_t kHidden = 3, kPerRank = 2; // experts

// Expert e multiplies with e + 1.
Tensor factor(const Tensor& expert) { return (expert + 1).to(at::kFloat); }

void check(const std::vector<int64_t>& rows_of_rank, int64_t k, bool all_to_last) {
  const Comm group = world().all();
  const int64_t experts = kPerRank * group.size(), me = group.rank();
  const int64_t rows = rows_of_rank[static_cast<size_t>(me)];
  const auto at = [&](int64_t count) { return arange(count, at::kLong) + 5 * me; };
  Tensor x = (at(rows * kHidden).remainder(7).to(at::kFloat) - 3).view({rows, kHidden});
  Tensor weight = (at(rows * k).remainder(5).to(at::kFloat) / 4).view({rows, k});
  const Tensor cotangent = (at(rows * kHidden).remainder(3).to(at::kFloat) - 1).view_as(x);
  Tensor idx = arange(k, at::kLong).view({1, k}) +
    (all_to_last ? zeros({rows, 1}, at::kLong) : 3 * at(rows).view({rows, 1}));
  idx = all_to_last ? experts - 1 - idx : idx.remainder(experts);

  x.set_requires_grad(true);
  weight.set_requires_grad(true);
  const Tensor expected = (x.unsqueeze(1) * (weight * factor(idx)).unsqueeze(2)).sum(1);
  torch::autograd::backward({expected}, {cotangent});

  ExpertExchange exchange(group, idx, experts);
  exchange.dispatch(x.detach(), weight.detach());
  ExpertExchange::Arrived arrived = exchange.arrive();
  arrived.rows = arrived.rows.detach().set_requires_grad(true);
  arrived.weight = arrived.weight.detach().set_requires_grad(true);
  std::vector<Tensor> slots; // of each local expert, multiplied
  const Tensor by_expert = permute(arrived.rows, arrived.plan);
  int64_t begin = 0;
  for (int64_t e = 0; e < kPerRank; ++e) {
    const int64_t end = arrived.plan.offsets[e].item<int>();
    slots.push_back(
      by_expert.narrow(0, begin, end - begin) * static_cast<double>(me * kPerRank + e + 1));
    begin = end;
  }
  EXPECT_EQ(begin, arrived.plan.num_slots());
  const Tensor out = unpermute(at::cat(slots), arrived.weight, arrived.plan);
  exchange.combine(out);
  EXPECT_LE(relative_error(exchange.combined(), expected), 1e-6);
  exchange.combine_backward(cotangent);
  torch::autograd::backward({out}, {exchange.combined_grad()});
  exchange.dispatch_backward(arrived.rows.grad(), arrived.weight.grad());
  const auto [grad_rows, grad_weight] = exchange.dispatched_grad();
  EXPECT_LE(relative_error(grad_rows, x.grad()), 1e-6);
  EXPECT_LE(relative_error(grad_weight, weight.grad()), 1e-6);
}

TEST(ExpertExchange, AnyNumberOfRowsOnEachRank) {
  const auto ranks = static_cast<size_t>(world().size());
  std::vector<int64_t> uneven(ranks), odd_only(ranks), last_only(ranks, 0);
  for (size_t r = 0; r < ranks; ++r) {
    uneven[r] = static_cast<int64_t>(1 + 3 * r);
    odd_only[r] = r % 2 == 0 ? 0 : 6;
  }
  last_only.back() = 5;
  for (const bool all_to_last: {false, true})
    for (const int64_t k: {1, 2})
      for (const auto& rows: {uneven, odd_only, last_only, std::vector<int64_t>(ranks, 0)})
        check(rows, k, all_to_last);
}

} // namespace
} // namespace pith::test
