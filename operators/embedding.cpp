#include "operators/embedding.h"

#include <ATen/ops/index_select.h>
#include <ATen/ops/sort.h>

#include "operators/function.h"

namespace pith {
namespace {

struct Embedding : torch::autograd::Function<Embedding> {
  static Tensor forward(
      AutogradContext* ctx, const Tensor& tokens, const Tensor& value, Parameter* weight) {
    ctx->save_for_backward({tokens});
    ctx->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    return at::index_select(value, 0, tokens);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    Tensor& grad = reinterpret_cast<Parameter*>(ctx->saved_data["weight"].toInt())->grad;
    const Tensor tokens = ctx->get_saved_variables()[0];
    const Tensor dy = grads[0].contiguous();  // (T, H)
    if (!ctx->needs_input_grad(1)) return {Tensor(), Tensor(), Tensor()};
    PITH_IF_CUDA (dy) {
      // Equal tokens become neighbours, in the order of their positions.
      const auto [sorted, position] =
          at::sort(tokens, /*stable=*/true, /*dim=*/0, /*descending=*/false);
      cuda::add_rows_by_token(sorted.const_data_ptr<int64_t>(), position.const_data_ptr<int64_t>(),
          dy.const_data_ptr(), grad.mutable_data_ptr<float>(), dy.size(0), dy.size(1), is_bf16(dy),
          current_stream());
      return {Tensor(), Tensor(), Tensor()};
    }
    grad.index_add_(0, tokens, widen(dy));  // in the order of positions
    return {Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor embedding(const Tensor& tokens, Parameter& weight) {
  check_shape(weight.value, weight.name, {-1, -1});
  check_shape(tokens, "embedding: tokens", {-1});
  check_dtype(tokens, "embedding: tokens", at::kLong);
  check_ids(tokens, "embedding: tokens", weight.value.size(0));
  return Embedding::apply(tokens.contiguous(), weight.value, &weight);
}

}  // namespace pith
