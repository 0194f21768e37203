#include "operators/router.h"
#include <ATen/ops/full_like.h>
#include <ATen/ops/isnan.h>
#include "operators/function.h"

namespace pith {
namespace {
Tensor select_topk(const Tensor& logits, int64_t k) {
  const Tensor wide = logits.to(kDouble).masked_fill(at::isnan(logits), -INFINITY);
  const double* row = wide.const_data_ptr<double>();
  Tensor idx = at::empty({logits.size(0), k}, logits.options().dtype(kLong));
  int64_t* out = idx.mutable_data_ptr<int64_t>();
  vector<int64_t> id(index(logits.size(1)));
  for (int64_t t = 0; t < logits.size(0); ++t, row += logits.size(1)) {
    std::iota(id.begin(), id.end(), 0);
    std::partial_sort(id.begin(), id.begin() + k, id.end(),
      [row](int64_t a, int64_t b) { return row[a] == row[b] ? a < b : row[a] > row[b]; });
    out = std::copy_n(id.begin(), k, out);
  }
  return idx;
}

// FP32; FP64 on the CPU, for finite differences.
void check_scores(const Tensor& scores, const char* name) {
  check_shape(scores, name, {-1, -1});
  const bool fits =
    scores.scalar_type() == kFloat || (scores.is_cpu() && scores.scalar_type() == kDouble);
  PITH_CHECK(fits, "{}: expected float32", describe(scores, name));
  PITH_CHECK(scores.is_cpu() || scores.size(1) <= 1024, "{}: CUDA takes at most 1024 experts",
    describe(scores, name));
}
}

Tensor topk_lowest_id(const Tensor& scores, int64_t k) {
  const NoGradGuard no_grad;
  return route(scores, k, /*normalize=*/false).topk_idx;
}

Routing route(const Tensor& given, int64_t k, bool normalize, const Tensor& given_forced) {
  const Tensor logits = given.contiguous();
  check_scores(logits, "route: logits");
  PITH_CHECK(k >= 1 && k <= logits.size(1), "route: k = {} of {} experts", k, logits.size(1));
  const Tensor forced = given_forced.defined() ? given_forced.contiguous() : given_forced;
  if (forced.defined()) {
    check_tensor(forced, "route: forced", kLong, {logits.size(0), k});
    check_ids(forced, "route: forced", logits.size(1));
  }
  PITH_IF_CUDA (logits) {
    const Tensor p = at::empty(logits.sizes(), logits.options());
    const Tensor weight = at::empty({p.size(0), k}, p.options());
    const Tensor idx = at::empty({p.size(0), k}, p.options().dtype(kLong));
    cuda::route_forward(read<float>(logits), read<int64_t>(forced), write<float>(p),
      write<int64_t>(idx), write<float>(weight), p.size(0), p.size(1), k, normalize);
    record({p, weight}, {logits}, [p = p.detach(), idx, normalize](const Tensors& grads) {
      const Tensor dp = grads[0].defined() ? grads[0].contiguous() : grads[0];
      const Tensor dweight = grads[1].defined() ? grads[1].contiguous() : grads[1];
      const Tensor dlogits = at::empty_like(p);
      cuda::route_backward(read<float>(p), read<int64_t>(idx), read<float>(dp),
        read<float>(dweight), write<float>(dlogits), p.size(0), p.size(1), idx.size(1), normalize);
      return Tensors{dlogits};
    });
    return {p, idx, weight};
  }
  const Tensor p = logits.softmax(1), idx = forced.defined() ? forced : select_topk(logits, k);
  const Tensor chosen = p.gather(1, idx);
  return {p, idx, normalize ? chosen / chosen.sum(1, /*keepdim=*/true) : chosen};
}

Tensor group_limited_topk(const Tensor& logits, int64_t k, int64_t groups, int64_t topk_groups) {
  const NoGradGuard no_grad;
  check_shape(logits, "group_limited_topk: logits", {-1, -1});
  const int64_t tokens = logits.size(0), size = logits.size(1) / max<int64_t>(1, groups);
  PITH_CHECK(groups >= 1 && size * groups == logits.size(1) && k <= topk_groups * size,
    "group_limited_topk: {} of {} experts from {} of {} groups", k, logits.size(1), topk_groups,
    groups);
  const Tensor grouped = logits.view({tokens, groups, size});
  Tensor left_out = at::ones({tokens, groups}, logits.options().dtype(kBool));
  left_out.scatter_(1, topk_lowest_id(grouped.amax(2), topk_groups), false);
  const double never = -numeric_limits<double>::infinity();
  return topk_lowest_id(
    grouped.masked_fill(left_out.unsqueeze(2), never).view({tokens, groups * size}), k);
}

Tensor balanced_routes(int64_t num_tokens, int64_t k, int64_t num_experts, Device device) {
  PITH_CHECK(k >= 1 && k <= num_experts, "balanced_routes: k = {} of {} experts", k, num_experts);
  const Tensor slots = at::arange(num_tokens * k, TensorOptions(kLong).device(device));
  return slots.remainder(num_experts).view({num_tokens, k});
}

function<RouterBalance()> start_balance_loss(const Tensor& given, const Tensor& topk_idx,
  const Tensor& row_id, int64_t num_rows, const Comm& context, BalanceKind kind,
  const Tensor& shares) {
  const Tensor p = given.contiguous();
  check_scores(p, "balance loss: probabilities");
  check_tensor(topk_idx, "balance loss: topk_idx", kLong, {p.size(0), -1});
  check_tensor(row_id, "balance loss: row_id", kInt, {p.size(0)});
  const int64_t num_experts = p.size(1), k = topk_idx.size(1), width = num_experts + 1;
  check_ids(topk_idx, "balance loss: topk_idx", num_experts);
  const Tensor row = at::where(row_id.lt(0), num_rows, row_id); // padding: one more row
  check_ids(row, "balance loss: row_id", num_rows + 1);
  // Choices of each expert in each row and, last, its tokens.
  const NoGradGuard no_grad;
  const Tensor cells = at::cat({topk_idx, at::full_like(topk_idx.narrow(1, 0, 1), num_experts)}, 1)
                         .add_(row.unsqueeze(1), width)
                         .view(-1);
  const Tensor one = at::ones({1}, topk_idx.options());
  Tensor counts = at::zeros({(num_rows + 1) * width}, topk_idx.options())
                    .scatter_add_(0, cells, one.expand(cells.sizes()))
                    .view({num_rows + 1, width});
  counts.select(0, num_rows).zero_();
  const Tensor local = counts.sum(0).narrow(0, 0, num_experts);
  auto travel = make_shared<Work>(context.all_reduce_async(counts));
  return [=] {
    travel->wait();
    const Tensor choices = counts.narrow(1, 0, num_experts).to(kDouble);
    const Tensor length = counts.narrow(1, num_experts, 1).clamp_min(1).to(kDouble);
    Tensor share = choices / (length * k);
    if (kind == BalanceKind::micro_batch) share = choices.sum(0) / choices.sum().clamp_min(1);
    if (kind == BalanceKind::global_batch) share = shares;
    const Tensor coefficient = (share * num_experts / length).to(p.scalar_type()); // (rows + 1, E)
    coefficient.select(0, num_rows).zero_();
    const Tensor loss =
      (p.detach() * coefficient.index_select(0, row)).sum(kDouble).to(p.scalar_type());
    return RouterBalance{record(loss, {p},
                           [coefficient, row](const Tensor& dloss) {
      return Tensors{coefficient.index_select(0, row).mul_(dloss)};
    }),
      local};
  };
}
}
