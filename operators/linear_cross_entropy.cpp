#include "operators/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include "operators/function.h"

namespace pith {
namespace {

constexpr int64_t kIgnored = -100;

// Rows of logits that exist at a time. Every chunk reads and writes the whole FP32 gradient of the
// head, so on a GPU few large chunks win; on a CPU the logits should stay in its cache.
int64_t rows_per_chunk(const Tensor& hidden, int64_t vocabulary) {
  const int64_t budget_bytes = hidden.is_cuda() ? int64_t{1} << 30 : int64_t{16} << 20;
  const int64_t granularity = hidden.is_cuda() ? 128 : 16;
  const int64_t limit = std::max(granularity, budget_bytes / (4 * vocabulary));
  const int64_t chunks = std::max<int64_t>(1, (hidden.size(0) + limit - 1) / limit);
  const int64_t rows = (hidden.size(0) + chunks - 1) / chunks;  // of nearly equal size
  return (rows + granularity - 1) / granularity * granularity;
}

// logits (C, V) -> logprobs (C); returns their gradient softmax - onehot (C, V), 0 in ignored rows,
// which takes the place of the logits, in the compute dtype where products can take it.
Tensor logits_to_gradient(Tensor& logits, const Tensor& labels, Tensor& logprobs, bool gradient,
    [[maybe_unused]] bool bf16) {
  PITH_IF_CUDA (logits) {
    cuda::cross_entropy_rows(logits.mutable_data_ptr<float>(), labels.const_data_ptr<int64_t>(),
        logprobs.mutable_data_ptr<float>(), logits.size(0), logits.size(1), gradient, bf16,
        current_stream());
    return gradient && bf16 ? logits.view(at::kBFloat16).narrow(1, 0, logits.size(1)) : logits;
  }
  const Tensor ignored = labels.eq(kIgnored), column = labels.clamp_min(0).unsqueeze(1);
  at::_log_softmax_out(logits, logits, 1, false);
  logprobs.copy_(logits.gather(1, column).squeeze(1)).masked_fill_(ignored, 0);
  if (gradient) {
    logits.exp_().scatter_(1, column, -1, "add").index_fill_(0, ignored.nonzero().squeeze(1), 0);
  }
  return logits;
}

struct Request {
  Parameter* weight;
  Tensor labels;
  double scale;
  int64_t chunk;
  bool hidden_gradient = false, weight_gradient = false;
};

// One pass over the chunks; returns scale * dhidden where it was asked for.
Tensor run_chunks(const Tensor& hidden, const Request& request, CrossEntropy& result) {
  at::NoGradGuard no_grad;
  const Tensor value = request.weight->value.detach();
  const int64_t num_tokens = hidden.size(0), vocabulary = value.size(0);
  const bool bf16 = is_bf16(hidden);
  const auto wide = wide_dtype(hidden.scalar_type());
  const bool gradient = request.hidden_gradient || request.weight_gradient;
  // CPU: BF16 operands are widened once here instead of once per chunk.
  const bool widened = bf16 && !hidden.is_cuda();
  const Tensor rows = widened ? hidden.to(wide) : hidden;
  const Tensor matrix = widened ? value.to(wide) : value;

  Tensor dhidden = request.hidden_gradient ? at::empty_like(rows) : Tensor();
  result.logprobs = at::empty({num_tokens}, hidden.options().dtype(wide));
  const int64_t chunk = std::min(request.chunk, num_tokens);
  Tensor buffer = at::empty({chunk, vocabulary}, hidden.options().dtype(wide));
  for (int64_t begin = 0; begin < num_tokens; begin += chunk) {
    const int64_t count = std::min(chunk, num_tokens - begin);
    const Tensor hidden_chunk = rows.narrow(0, begin, count);
    Tensor logits = buffer.narrow(0, 0, count);
    Tensor logprobs = result.logprobs.narrow(0, begin, count);
    mm_wide_out(logits, hidden_chunk, matrix.t());
    const Tensor dlogits = logits_to_gradient(
        logits, request.labels.narrow(0, begin, count), logprobs, gradient, bf16);
    if (request.hidden_gradient) {
      Tensor out = dhidden.narrow(0, begin, count);
      at::addmm_out(out, out, dlogits, matrix, /*beta=*/0, /*alpha=*/request.scale);
    }
    if (request.weight_gradient) {
      add_weight_gradient(request.weight->grad, dlogits, hidden_chunk, request.scale);
    }
  }
  const Tensor sum = result.logprobs.sum(at::kDouble);  // FP64: no digits lost over many tokens
  result.loss_sum = sum.neg().to(wide);
  result.loss = (sum * -request.scale).to(wide);
  return dhidden.defined() ? dhidden.to(hidden.scalar_type()) : dhidden;
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& hidden,
      const Tensor& /*value: makes the graph record*/, const Request& request,
      CrossEntropy* result) {
    const Tensor dhidden = run_chunks(hidden, request, *result);
    if (dhidden.defined()) ctx->saved_data["dhidden"] = dhidden;
    return result->loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (grads[0].is_cpu()) {  // reading it on CUDA would wait for the device
      const double gradient = grads[0].item().toDouble();
      PITH_CHECK(gradient == 1.0,
          "linear_cross_entropy: loss got the gradient {} instead of 1; it must be a root of "
          "the backward, since dW was added in the forward: put factors into scale",
          gradient);
    }
    const bool has = ctx->saved_data.count("dhidden") > 0;
    return {has ? ctx->saved_data["dhidden"].toTensor() : Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

CrossEntropy linear_cross_entropy(const Tensor& hidden, Parameter& weight, const Tensor& labels,
    double scale, int64_t chunk_tokens) {
  const int64_t vocabulary = weight.value.size(0);
  check_shape(hidden, "linear_cross_entropy: hidden", {-1, weight.value.size(1)});
  check_dtype(hidden, "linear_cross_entropy: hidden", weight.value.scalar_type());
  check_shape(labels, "linear_cross_entropy: labels", {hidden.size(0)});
  check_dtype(labels, "linear_cross_entropy: labels", at::kLong);
  check_ids(labels, "labels", vocabulary, kIgnored);

  const bool record = at::GradMode::is_enabled();
  Request request{&weight, labels.contiguous(), scale,
      chunk_tokens > 0 ? chunk_tokens : rows_per_chunk(hidden, vocabulary)};
  request.hidden_gradient = record && hidden.requires_grad();
  request.weight_gradient = record && weight.value.requires_grad();
  CrossEntropy result;
  if (request.hidden_gradient || request.weight_gradient) {
    result.loss = LinearCrossEntropy::apply(hidden.contiguous(), weight.value, request, &result);
  } else {
    run_chunks(hidden.contiguous(), request, result);
  }
  return result;
}

Tensor head_logits(const Tensor& hidden, const Parameter& weight) {
  at::NoGradGuard no_grad;
  check_shape(hidden, "head_logits: hidden", {-1, weight.value.size(1)});
  check_dtype(hidden, "head_logits: hidden", weight.value.scalar_type());
  return mm_wide(hidden, weight.value.t());
}

}  // namespace pith
