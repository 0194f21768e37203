#include "operators/embedding.h"

#include <ATen/ops/sort.h>

#include "operators/function.h"

namespace pith {
namespace {

void add_gradient(Tensor& grad, const Tensor& tokens, const Tensor& dy) {  // dy (T, H)
  PITH_IF_CUDA (dy) {
    // Equal tokens become neighbours, in the order of their positions.
    const auto [sorted, position] =
        at::sort(tokens, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    return cuda::add_rows_by_token(read<int64_t>(sorted), read<int64_t>(position),
        read(dy.contiguous()), write<float>(grad), dy.size(0), dy.size(1), is_bf16(dy),
        current_stream());
  }
  grad.index_add_(0, tokens, widen(dy));  // in the order of positions
}

}  // namespace

Tensor embedding(const Tensor& given, Parameter& weight) {
  check_shape(weight.value, weight.name, {-1, -1});
  check_tensor(given, "embedding: tokens", at::kLong, {-1});
  check_ids(given, "embedding: tokens", weight.value.size(0));
  const Tensor tokens = given.contiguous();
  return record(at::index_select(weight.value.detach(), 0, tokens), {weight.value},
      [tokens, &weight](const Tensor& dy) {
        add_gradient(weight.grad, tokens, dy);
        return Tensors(1);
      });
}

}  // namespace pith
