#include "operators/embedding.h"

#include <ATen/Parallel.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/sort.h>
#include <torch/csrc/autograd/custom_function.h>
#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include "operators/dispatch.h"

namespace pith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Threads share the columns: each adds its part of every row in the order of positions.
template <class T>
void add_rows_cpu(const Tensor& tokens, const Tensor& dy, Tensor& grad) {
  const int64_t hidden = dy.size(1);
  const int64_t* token = tokens.const_data_ptr<int64_t>();
  const T* source = dy.const_data_ptr<T>();
  Wide<T>* target = grad.mutable_data_ptr<Wide<T>>();
  at::parallel_for(0, hidden, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < tokens.numel(); ++t) {
      Wide<T>* out = target + token[t] * hidden;
      const T* in = source + t * hidden;
      for (int64_t j = begin; j < end; ++j) out[j] += static_cast<Wide<T>>(in[j]);
    }
  });
}

struct Embedding : torch::autograd::Function<Embedding> {
  static Tensor forward(AutogradContext* ctx, const Tensor& tokens, const Tensor& value,
                        Parameter* weight) {
    ctx->save_for_backward({tokens});
    ctx->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    return at::index_select(value, 0, tokens);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    auto* weight = reinterpret_cast<Parameter*>(ctx->saved_data["weight"].toInt());
    const Tensor tokens = ctx->get_saved_variables()[0];
    const Tensor dy = grads[0].contiguous();  // (T, H)
    if (tokens.numel() == 0 || !ctx->needs_input_grad(1)) return {Tensor(), Tensor(), Tensor()};
#if PITH_CUDA
    if (has_kernel(dy)) {
      // Equal tokens become neighbours, in the order of their positions.
      const auto [sorted, position] =
          at::sort(tokens, /*stable=*/true, /*dim=*/0, /*descending=*/false);
      cuda::add_rows_by_token(sorted.const_data_ptr<int64_t>(), position.const_data_ptr<int64_t>(),
                              dy.const_data_ptr(), weight->grad.mutable_data_ptr<float>(),
                              dy.size(0), dy.size(1), dy.scalar_type() == at::kBFloat16,
                              c10::cuda::getCurrentCUDAStream());
      return {Tensor(), Tensor(), Tensor()};
    }
#endif
    dispatch_float(dy, "embedding: gradient",
                   [&](auto type) { add_rows_cpu<decltype(type)>(tokens, dy, weight->grad); });
    return {Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor embedding(const Tensor& tokens, Parameter& weight) {
  check_shape(weight.value, weight.name, {-1, -1});
  check_shape(tokens, "embedding: tokens", {-1});
  check_dtype(tokens, "embedding: tokens", at::kLong);
  const Tensor ids = tokens.contiguous();
  if (ids.is_cpu()) {
    const int64_t* id = ids.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < ids.numel(); ++t) {
      PITH_CHECK(id[t] >= 0 && id[t] < weight.value.size(0),
                 "tokens[{}] = {} is not in [0, {}) of {}", t, id[t], weight.value.size(0),
                 weight.name);
    }
  }
  return Embedding::apply(ids, weight.value, &weight);
}

}  // namespace pith
