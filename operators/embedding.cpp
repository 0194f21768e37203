#include "operators/embedding.h"
#include "operators/function.h"

namespace pith {
Tensor embedding(const Tensor& given, Parameter& weight) {
  check_shape(weight.value, weight.name, {-1, -1});
  check_tensor(given, "embedding: tokens", kLong, {-1});
  check_ids(given, "embedding: tokens", weight.value.size(0));
  const Tensor tokens = given.contiguous();
  return record(at::index_select(weight.value.detach(), 0, tokens), {weight.value},
    [tokens, &weight](const Tensor& dy) {
    // In the order of positions; on CUDA index_add would add in any.
    if (dy.is_cuda()) weight.grad.index_put_({tokens}, widen(dy), /*accumulate=*/true);
    else weight.grad.index_add_(0, tokens, widen(dy));
    return Tensors(1);
  });
}
}
