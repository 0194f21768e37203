#include "operators/linear_cross_entropy.h"
#include <ATen/ops/_log_softmax.h>
#include "operators/function.h"

namespace pith {
namespace {
constexpr int64_t kIgnored = -100;

// Every chunk reads and writes the head's whole FP32 gradient: few large chunks win on a GPU; on a
// CPU the logits should stay in its cache.
int64_t rows_per_chunk(const Tensor& hidden, int64_t vocabulary) {
  const int64_t budget_bytes = hidden.is_cuda() ? int64_t{5} << 28 : int64_t{16} << 20;
  const int64_t granularity = hidden.is_cuda() ? 128 : 16;
  const int64_t row_bytes = vocabulary * (hidden.is_cuda() ? hidden.element_size() : 4);
  const int64_t limit = max(granularity, budget_bytes / row_bytes);
  const int64_t chunks = max<int64_t>(1, (hidden.size(0) + limit - 1) / limit);
  const int64_t rows = (hidden.size(0) + chunks - 1) / chunks; // nearly equal
  return (rows + granularity - 1) / granularity * granularity;
}

// logits (C, V) -> logprobs (C) and, with `gradient`, logits <- softmax - onehot, 0 if ignored.
void logits_to_gradient(Tensor& logits, const Tensor& labels, Tensor& logprobs, bool gradient) {
  PITH_IF_CUDA (logits) {
    cuda::cross_entropy_rows(write(logits), read<int64_t>(labels), write<float>(logprobs),
      logits.size(0), logits.size(1), gradient);
    return;
  }
  const Tensor ignored = labels.eq(kIgnored), column = labels.clamp_min(0).unsqueeze(1);
  at::_log_softmax_out(logits, logits, 1, false);
  logprobs.copy_(logits.gather(1, column).squeeze(1)).masked_fill_(ignored, 0);
  if (gradient)
    logits.exp_().scatter_(1, column, -1, "add").index_fill_(0, ignored.nonzero().squeeze(1), 0);
}
}

CrossEntropy linear_cross_entropy(const Tensor& given, Parameter& weight, const Tensor& labels,
  double scale, int64_t chunk_tokens) {
  const int64_t vocabulary = weight.value.size(0), num_tokens = given.size(0);
  check_tensor(
    given, "linear_cross_entropy: hidden", weight.value.scalar_type(), {-1, weight.value.size(1)});
  check_tensor(labels, "linear_cross_entropy: labels", kLong, {num_tokens});
  check_ids(labels, "labels", vocabulary, kIgnored);

  const bool hidden_gradient = at::GradMode::is_enabled() && given.requires_grad();
  const bool weight_gradient = at::GradMode::is_enabled() && weight.value.requires_grad();
  const bool gradient = hidden_gradient || weight_gradient;
  // CPU: BF16 operands are widened once, not in every chunk.
  const auto widened = [&](const Tensor& x) { return given.is_cuda() ? x : widen(x); };
  const Tensor hidden = widened(given.detach().contiguous());
  const Tensor matrix = widened(weight.value.detach());
  const auto wide = given.options().dtype(wide_dtype(given.scalar_type()));

  CrossEntropy result;
  result.logprobs = at::empty({num_tokens}, wide);
  Tensor dhidden = hidden_gradient ? at::empty_like(hidden) : Tensor();
  const int64_t chunk =
    min(chunk_tokens > 0 ? chunk_tokens : rows_per_chunk(hidden, vocabulary), num_tokens);
  const Tensor buffer = at::empty({chunk, vocabulary}, given.is_cuda() ? given.options() : wide);
  const Tensor all_labels = labels.contiguous();
  for (int64_t begin = 0; begin < num_tokens; begin += chunk) {
    const int64_t count = min(chunk, num_tokens - begin);
    const Tensor hidden_chunk = hidden.narrow(0, begin, count);
    Tensor logits = buffer.narrow(0, 0, count);
    Tensor logprobs = result.logprobs.narrow(0, begin, count);
    multiply_into(logits, hidden_chunk, matrix.t());
    logits_to_gradient(logits, all_labels.narrow(0, begin, count), logprobs, gradient);
    if (hidden_gradient) {
      Tensor out = dhidden.narrow(0, begin, count);
      at::addmm_out(out, out, logits, matrix, /*beta=*/0, /*alpha=*/scale);
    }
    if (weight_gradient) add_weight_gradient(weight.grad, logits, hidden_chunk, scale);
  }
  const Tensor sum = result.logprobs.sum(kDouble); // FP64: no digits lost
  result.loss_sum = sum.neg().to(wide);
  result.loss = (sum * -scale).to(wide);
  if (hidden_gradient) dhidden = dhidden.to(given.scalar_type());
  record(result.loss, {given, weight.value}, [dhidden](const Tensor& dloss) {
    // On CUDA reading it would wait.
    PITH_CHECK(dloss.is_cuda() || dloss.item().toDouble() == 1.0,
      "linear_cross_entropy: loss got the gradient {} instead of 1; it must be a root of the "
      "backward, since dW was added in the forward: put factors into scale",
      dloss.item().toDouble());
    return Tensors{dhidden, Tensor()};
  });
  return result;
}

Tensor head_logits(const Tensor& hidden, const Parameter& weight) {
  check_tensor(
    hidden, "head_logits: hidden", weight.value.scalar_type(), {-1, weight.value.size(1)});
  return multiply(hidden, weight.value.t(), wide_dtype(hidden.scalar_type()));
}
}
