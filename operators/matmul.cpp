#include "operators/matmul.h"
#include "operators/function.h"

namespace pith {
namespace {
// LibTorch has products with an FP32 result on CUDA only; elsewhere operands are widened.
bool widen_first(const Tensor& a) { return !a.is_cuda() && a.scalar_type() == kBFloat16; }

vector<WeightGradient>* deferred = nullptr;
}

void multiply_into(Tensor& out, const Tensor& a, const Tensor& b) {
  const NoGradGuard no_grad;
  if (widen_first(a)) out.copy_(at::mm(a.to(kFloat), b.to(kFloat)));
  else if (a.scalar_type() == out.scalar_type()) at::mm_out(out, a, b);
  else at::mm_out(out, a, b, out.scalar_type());
}

Tensor multiply(const Tensor& a, const Tensor& b, ScalarType dtype) {
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(dtype));
  multiply_into(out, a, b);
  return out;
}

void add_weight_gradient(const Tensor& gradient, const Tensor& dy, const Tensor& x, double alpha) {
  if (x.size(0) == 0) return;
  Tensor out = gradient; // the same memory
  if (widen_first(x) || widen_first(dy))
    at::addmm_out(out, out, dy.to(kFloat).t(), x.to(kFloat), 1, alpha);
  else if (x.scalar_type() == out.scalar_type()) at::addmm_out(out, out, dy.t(), x, 1, alpha);
  else at::addmm_out(out, out, dy.t(), x, out.scalar_type(), 1, alpha);
}

void add_weight_gradient(const WeightGradient& job) {
  const NoGradGuard no_grad;
  const Tensor& gradient = job.weight->grad;
  if (!job.offsets.defined()) return add_weight_gradient(gradient, job.dy, job.x);
  PITH_IF_CUDA (job.x) {
    if (is_bf16(job.x) &&
      cuda::grouped_weight_gradient(read(job.dy), read(job.x), read<int32_t>(job.offsets),
        write<float>(gradient), job.x.size(0), gradient.size(0), gradient.size(1),
        gradient.size(2)))
      return;
  }
  for_each_expert(job.offsets, [&](int64_t e, int64_t begin, int64_t count) {
    add_weight_gradient(
      gradient.select(0, e), job.dy.narrow(0, begin, count), job.x.narrow(0, begin, count));
  });
}

DeferWeightGradients::DeferWeightGradients(vector<WeightGradient>& jobs) {
  PITH_CHECK(deferred == nullptr, "weight gradients are already being deferred");
  deferred = &jobs;
}
DeferWeightGradients::~DeferWeightGradients() { deferred = nullptr; }

void add_or_defer(WeightGradient job) {
  if (deferred != nullptr) deferred->push_back(std::move(job));
  else add_weight_gradient(job);
}
}
