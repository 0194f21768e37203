#include "operators/router.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <cmath>

namespace pith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

#if PITH_CUDA
CUstream_st* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
#endif

int64_t grain(int64_t work_per_row) { return std::max<int64_t>(1, 16384 / (work_per_row + 1)); }

// Insertion into a sorted list: a score enters behind equal ones, so that ties go to the lower id.
template <class T>
void topk_cpu(const Tensor& scores, Tensor& idx) {
  const int64_t num_experts = scores.size(1), k = idx.size(1);
  const T* all = scores.const_data_ptr<T>();
  int64_t* chosen = idx.mutable_data_ptr<int64_t>();
  at::parallel_for(0, scores.size(0), grain(num_experts), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* score = all + t * num_experts;
      int64_t* best = chosen + t * k;
      for (int64_t e = 0; e < num_experts; ++e) {
        PITH_CHECK(!std::isnan(score[e]), "topk_lowest_id: scores({}, {}) is NaN", t, e);
        int64_t place = std::min(e, k);  // number of ids in the list
        if (place == k && !(score[e] > score[best[k - 1]])) continue;
        place = std::min(place, k - 1);
        for (; place > 0 && score[e] > score[best[place - 1]]; --place)
          best[place] = best[place - 1];
        best[place] = e;
      }
    }
  });
}

Tensor select_topk(const Tensor& scores, int64_t k) {
  Tensor idx = at::empty({scores.size(0), k}, scores.options().dtype(at::kLong));
#if PITH_CUDA
  if (scores.is_cuda()) {
    cuda::topk_lowest_id(scores.const_data_ptr<float>(), idx.mutable_data_ptr<int64_t>(),
        scores.size(0), scores.size(1), k, current_stream());
    return idx;
  }
#endif
  if (scores.scalar_type() == at::kDouble) {
    topk_cpu<double>(scores, idx);
  } else {
    topk_cpu<float>(scores, idx);
  }
  return idx;
}

template <class T>
void route_weights_cpu(
    const Tensor& probabilities, const Tensor& idx, Tensor& weight, bool normalize) {
  const int64_t num_experts = probabilities.size(1), k = idx.size(1);
  const T* p = probabilities.const_data_ptr<T>();
  const int64_t* e = idx.const_data_ptr<int64_t>();
  T* w = weight.mutable_data_ptr<T>();
  for (int64_t t = 0; t < idx.size(0); ++t, p += num_experts, e += k, w += k) {
    T sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += w[j] = p[e[j]];
    if (!normalize) continue;
    for (int64_t j = 0; j < k; ++j) w[j] /= sum;
  }
}

// dlogits = p (dp - <p, dp>), with dp the gradient of the probabilities plus, at the chosen
// experts, that of the weights: w_j = p_j, or p_j / s with s the sum of the chosen, whose gradient
// is (dw_j - <w, dw>) / s.
template <class T>
void route_backward_cpu(const Tensor& probabilities, const Tensor& idx,
    const Tensor& dprobabilities, const Tensor& dweight, Tensor& dlogits, bool normalize) {
  const int64_t num_experts = probabilities.size(1), k = idx.size(1);
  const T* all_p = probabilities.const_data_ptr<T>();
  const int64_t* all_e = idx.const_data_ptr<int64_t>();
  const T* all_dp = dprobabilities.defined() ? dprobabilities.const_data_ptr<T>() : nullptr;
  const T* all_dw = dweight.defined() ? dweight.const_data_ptr<T>() : nullptr;
  T* out = dlogits.mutable_data_ptr<T>();
  at::parallel_for(0, idx.size(0), grain(4 * num_experts), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* p = all_p + t * num_experts;
      T* dx = out + t * num_experts;
      for (int64_t e = 0; e < num_experts; ++e) dx[e] = all_dp ? all_dp[t * num_experts + e] : T{0};
      if (all_dw) {
        const int64_t* chosen = all_e + t * k;
        const T* dw = all_dw + t * k;
        T sum = 0, inner = 0;
        for (int64_t j = 0; j < k; ++j) sum += p[chosen[j]];
        for (int64_t j = 0; j < k; ++j) inner += dw[j] * p[chosen[j]];
        for (int64_t j = 0; j < k; ++j) {
          dx[chosen[j]] += normalize ? (dw[j] - inner / sum) / sum : dw[j];
        }
      }
      T inner = 0;
      for (int64_t e = 0; e < num_experts; ++e) inner += p[e] * dx[e];
      for (int64_t e = 0; e < num_experts; ++e) dx[e] = p[e] * (dx[e] - inner);
    }
  });
}

struct Route : torch::autograd::Function<Route> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, int64_t k,
      bool normalize, const Tensor* forced, Tensor* topk_idx) {
    Tensor probabilities, weight = at::empty({logits.size(0), k}, logits.options());
#if PITH_CUDA
    if (logits.is_cuda()) {
      probabilities = at::empty_like(logits);
      *topk_idx = at::empty({logits.size(0), k}, logits.options().dtype(at::kLong));
      cuda::route_forward(logits.const_data_ptr<float>(),
          forced->defined() ? forced->const_data_ptr<int64_t>() : nullptr,
          probabilities.mutable_data_ptr<float>(), topk_idx->mutable_data_ptr<int64_t>(),
          weight.mutable_data_ptr<float>(), logits.size(0), logits.size(1), k, normalize,
          current_stream());
    }
#endif
    if (logits.is_cpu()) {
      probabilities = at::_softmax(logits, 1, false);
      *topk_idx = forced->defined() ? *forced : select_topk(logits, k);
      if (logits.scalar_type() == at::kDouble) {
        route_weights_cpu<double>(probabilities, *topk_idx, weight, normalize);
      } else {
        route_weights_cpu<float>(probabilities, *topk_idx, weight, normalize);
      }
    }
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({probabilities});
    ctx->saved_data["topk_idx"] = *topk_idx;
    ctx->saved_data["normalize"] = normalize;
    return {probabilities, weight};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    const Tensor probabilities = ctx->get_saved_variables()[0];
    const Tensor idx = ctx->saved_data["topk_idx"].toTensor();
    const bool normalize = ctx->saved_data["normalize"].toBool();
    Tensor dlogits;
    if (grads[0].defined() || grads[1].defined()) {
      const Tensor dp = grads[0].defined() ? grads[0].contiguous() : grads[0];
      const Tensor dw = grads[1].defined() ? grads[1].contiguous() : grads[1];
      dlogits = at::empty_like(probabilities);
#if PITH_CUDA
      if (dlogits.is_cuda()) {
        cuda::route_backward(probabilities.const_data_ptr<float>(), idx.const_data_ptr<int64_t>(),
            dp.defined() ? dp.const_data_ptr<float>() : nullptr,
            dw.defined() ? dw.const_data_ptr<float>() : nullptr, dlogits.mutable_data_ptr<float>(),
            dlogits.size(0), dlogits.size(1), idx.size(1), normalize, current_stream());
      }
#endif
      if (dlogits.is_cpu() && dlogits.scalar_type() == at::kDouble) {
        route_backward_cpu<double>(probabilities, idx, dp, dw, dlogits, normalize);
      } else if (dlogits.is_cpu()) {
        route_backward_cpu<float>(probabilities, idx, dp, dw, dlogits, normalize);
      }
    }
    return {dlogits, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

// loss, and coefficient (num_rows, E): dloss / dprobability, equal for all tokens of a row.
template <class T>
void balance_forward_cpu(const Tensor& probabilities, const Tensor& idx, const Tensor& row_id,
    const Comm& context, Tensor& loss, Tensor& coefficient) {
  const int64_t tokens = probabilities.size(0), num_experts = probabilities.size(1),
                k = idx.size(1);
  const int64_t num_rows = coefficient.size(0);
  const auto cells = static_cast<size_t>(num_rows * num_experts);
  std::vector<double> sum(cells, 0.0);
  // Choices of each expert in each row and, last, the row's tokens.
  Tensor counts = at::zeros({num_rows, num_experts + 1}, idx.options());
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  const T* p = probabilities.const_data_ptr<T>();
  const int64_t* chosen = idx.const_data_ptr<int64_t>();
  const int32_t* row = row_id.const_data_ptr<int32_t>();
  for (int64_t t = 0; t < tokens; ++t, p += num_experts, chosen += k) {
    PITH_CHECK(row[t] >= (t > 0 ? row[t - 1] : 0) && row[t] < num_rows,
        "sequence_balance_loss: row_id[{}] = {} is not ascending in [0, {})", t, row[t], num_rows);
    int64_t* of_row = count + row[t] * (num_experts + 1);
    for (int64_t j = 0; j < k; ++j) ++of_row[chosen[j]];
    ++of_row[num_experts];
    const auto first = static_cast<size_t>(row[t] * num_experts);
    for (size_t e = 0; e < static_cast<size_t>(num_experts); ++e) sum[first + e] += p[e];
  }
  context.all_reduce(counts);
  T* c = coefficient.mutable_data_ptr<T>();
  double total = 0;
  size_t cell = 0;
  for (int64_t r = 0; r < num_rows; ++r, count += num_experts + 1) {
    const auto n = static_cast<double>(count[num_experts]);
    for (int64_t e = 0; e < num_experts; ++e, ++cell) {
      const double factor = n == 0
                                ? 0
                                : static_cast<double>(num_experts) * static_cast<double>(count[e]) /
                                      (static_cast<double>(k) * n * n);
      c[cell] = static_cast<T>(factor);
      total += factor * sum[cell];
    }
  }
  *loss.mutable_data_ptr<T>() = static_cast<T>(total);
}

struct BalanceLoss : torch::autograd::Function<BalanceLoss> {
  static Tensor forward(AutogradContext* ctx, const Tensor& probabilities, const Tensor& idx,
      const Tensor& row_id, int64_t num_rows, const Comm* context) {
    const int64_t num_experts = probabilities.size(1);
    Tensor loss = at::empty({}, probabilities.options());
    Tensor coefficient = at::empty({num_rows, num_experts}, probabilities.options());
#if PITH_CUDA
    if (probabilities.is_cuda()) {
      const auto integer = probabilities.options().dtype(at::kInt);
      Tensor sum = at::empty({num_rows, cuda::kBalanceParts, num_experts}, probabilities.options());
      Tensor count = at::empty(sum.sizes(), integer), start = at::empty({num_rows + 1}, integer);
      cuda::balance_parts(probabilities.const_data_ptr<float>(), idx.const_data_ptr<int64_t>(),
          row_id.const_data_ptr<int32_t>(), sum.mutable_data_ptr<float>(),
          count.mutable_data_ptr<int32_t>(), start.mutable_data_ptr<int32_t>(),
          probabilities.size(0), num_experts, idx.size(1), num_rows, current_stream());
      Tensor global;
      if (context->size() > 1) {
        const Tensor length = start.narrow(0, 1, num_rows) - start.narrow(0, 0, num_rows);
        global = at::cat({count.sum(1), length.unsqueeze(1).to(at::kLong)}, 1);
        context->all_reduce(global);
      }
      cuda::balance_total(sum.const_data_ptr<float>(), count.const_data_ptr<int32_t>(),
          start.const_data_ptr<int32_t>(),
          global.defined() ? global.const_data_ptr<int64_t>() : nullptr,
          loss.mutable_data_ptr<float>(), coefficient.mutable_data_ptr<float>(), num_experts,
          idx.size(1), num_rows, current_stream());
    }
#endif
    if (probabilities.is_cpu() && probabilities.scalar_type() == at::kDouble) {
      balance_forward_cpu<double>(probabilities, idx, row_id, *context, loss, coefficient);
    } else if (probabilities.is_cpu()) {
      balance_forward_cpu<float>(probabilities, idx, row_id, *context, loss, coefficient);
    }
    ctx->saved_data["coefficient"] = coefficient;
    ctx->saved_data["row_id"] = row_id;
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    const Tensor coefficient = ctx->saved_data["coefficient"].toTensor();
    const Tensor row_id = ctx->saved_data["row_id"].toTensor();
    Tensor dprobabilities;
#if PITH_CUDA
    if (coefficient.is_cuda()) {
      dprobabilities = at::empty({row_id.size(0), coefficient.size(1)}, coefficient.options());
      cuda::balance_backward(grads[0].const_data_ptr<float>(), coefficient.const_data_ptr<float>(),
          row_id.const_data_ptr<int32_t>(), dprobabilities.mutable_data_ptr<float>(),
          dprobabilities.size(0), dprobabilities.size(1), current_stream());
    }
#endif
    if (coefficient.is_cpu()) dprobabilities = at::index_select(coefficient * grads[0], 0, row_id);
    return {dprobabilities, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

// Scores are FP32; FP64 is taken on the CPU, for finite differences.
void check_scores(const Tensor& scores, const char* name) {
  check_shape(scores, name, {-1, -1});
  const bool fits = scores.scalar_type() == at::kFloat ||
                    (scores.is_cpu() && scores.scalar_type() == at::kDouble);
  PITH_CHECK(fits, "{}: expected float32", describe(scores, name));
  PITH_CHECK(scores.is_cpu() || scores.size(1) <= 1024, "{}: CUDA takes at most 1024 experts",
      describe(scores, name));
}

void check_ids_cpu(const Tensor& idx, const char* name, int64_t num_experts) {
  const int64_t* id = idx.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < idx.numel(); ++i) {
    PITH_CHECK(id[i] >= 0 && id[i] < num_experts, "{}({}, {}) = {} is not in [0, {})", name,
        i / idx.size(1), i % idx.size(1), id[i], num_experts);
  }
}

}  // namespace

Tensor topk_lowest_id(const Tensor& scores, int64_t k) {
  at::NoGradGuard no_grad;
  check_scores(scores, "topk_lowest_id: scores");
  PITH_CHECK(
      k >= 1 && k <= scores.size(1), "topk_lowest_id: k = {} of {} experts", k, scores.size(1));
  return select_topk(scores.contiguous(), k);
}

Routing route(const Tensor& logits, int64_t k, bool normalize, const Tensor& forced) {
  check_scores(logits, "route: logits");
  PITH_CHECK(k >= 1 && k <= logits.size(1), "route: k = {} of {} experts", k, logits.size(1));
  const Tensor chosen = forced.defined() ? forced.contiguous() : forced;
  if (chosen.defined()) {
    check_shape(chosen, "route: forced", {logits.size(0), k});
    check_dtype(chosen, "route: forced", at::kLong);
    if (chosen.is_cpu()) check_ids_cpu(chosen, "route: forced", logits.size(1));
  }
  Routing routing;
  auto outputs = Route::apply(logits.contiguous(), k, normalize, &chosen, &routing.topk_idx);
  routing.probabilities = outputs[0];
  routing.topk_weight = outputs[1];
  return routing;
}

Tensor balanced_routes(int64_t num_tokens, int64_t k, int64_t num_experts, at::Device device) {
  PITH_CHECK(k >= 1 && k <= num_experts, "balanced_routes: k = {} of {} experts", k, num_experts);
  const Tensor slots = at::arange(num_tokens * k, at::TensorOptions(at::kLong).device(device));
  return slots.remainder(num_experts).view({num_tokens, k});
}

Tensor sequence_balance_loss(const Tensor& probabilities, const Tensor& topk_idx,
    const Tensor& row_id, int64_t num_rows, const Comm& context) {
  check_scores(probabilities, "sequence_balance_loss: probabilities");
  check_shape(topk_idx, "sequence_balance_loss: topk_idx", {probabilities.size(0), -1});
  check_dtype(topk_idx, "sequence_balance_loss: topk_idx", at::kLong);
  check_shape(row_id, "sequence_balance_loss: row_id", {probabilities.size(0)});
  check_dtype(row_id, "sequence_balance_loss: row_id", at::kInt);
  const Tensor idx = topk_idx.contiguous();
  if (idx.is_cpu()) check_ids_cpu(idx, "sequence_balance_loss: topk_idx", probabilities.size(1));
  return BalanceLoss::apply(
      probabilities.contiguous(), idx, row_id.contiguous(), num_rows, &context);
}

}  // namespace pith
