#include "operators/function.h"
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#if PITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace pith {
namespace {
struct Recorded : torch::autograd::Node {
  function<Tensors(const Tensors&)> backward;

  Tensors apply(Tensors&& gradients) override {
    const NoGradGuard no_grad;
    PITH_CHECK(backward, "a graph's backward pass runs once");
    return backward(gradients);
  }
  void release_variables() override { backward = nullptr; }
};
}

Tensor record(const Tensor& y, const Tensors& inputs, function<Tensors(const Tensor&)> backward) {
  record(Tensors{y}, inputs, [count = inputs.size(), f = std::move(backward)](const Tensors& dy) {
    return dy[0].defined() ? f(dy[0]) : Tensors(count);
  });
  return y;
}

void record(
  const Tensors& outputs, const Tensors& inputs, function<Tensors(const Tensors&)> backward) {
  const bool needed = ranges::any_of(inputs, [](const Tensor& x) { return x.requires_grad(); });
  if (!at::GradMode::is_enabled() || !needed) return;
  const shared_ptr<Recorded> node(new Recorded, torch::autograd::deleteNode);
  node->backward = std::move(backward);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  torch::autograd::set_history(outputs, node);
}

void check_ids(const Tensor& ids, string_view name, int64_t end, int64_t none) {
  if (!ids.is_cpu()) return;
  const Tensor all = ids.to(kLong).contiguous();
  const int64_t* id = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < all.numel(); ++i) {
    if ((id[i] >= 0 && id[i] < end) || (none < 0 && id[i] == none)) [[likely]]
      continue;
    const string place = ids.dim() == 2 ? fmt::format("({}, {})", i / ids.size(1), i % ids.size(1))
                                        : fmt::format("[{}]", i);
    PITH_FAIL("{}{} = {} is not in [0, {}){}", name, place, id[i], end,
      none < 0 ? fmt::format(" and not {}", none) : "");
  }
}

namespace cuda {

void fail(const char* what, const char* error, const char* file, unsigned line) {
  throw Error(file, int(line), what, fmt::format("CUDA: {}", error));
}

#if PITH_CUDA
CUstream_st* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
#endif
}
}
