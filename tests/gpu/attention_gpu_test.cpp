#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include "operators/attention.h"
#include "tests/gpu/gpu_check.h"
#include "tests/operators/spans.h"

namespace pith::test {
namespace {
struct Case {
  std::vector<int32_t> cu_q, cu_k;
  int64_t heads, kv_heads, dim;
  std::string path; // how the BF16 kernel's name starts
  int64_t v_dim = dim;
};

std::vector<int32_t> rows(int32_t count, int32_t length) {
  std::vector<int32_t> cu;
  for (int32_t d = 0; d <= count; ++d) cu.push_back(d * length);
  return cu;
}

const Case kCases[] = {
  {rows(2, 256), rows(2, 256), 32, 4, 128, "cuDNN"},
  {rows(1, 128), rows(1, 128), 8, 8, 64, "cuDNN"},
  {rows(3, 128), rows(3, 128), 12, 2, 128, "cuDNN"},
  {rows(2, 192), rows(2, 192), 4, 2, 64, "Flash"}, // equal, but not a round length
  {{0, 0, 5, 5, 12}, {0, 0, 5, 5, 12}, 8, 2, 64, "Flash"},
  {{0, 1, 2, 3}, {0, 1, 2, 3}, 32, 4, 128, "Flash"}, // documents of one token
  {{0, 1}, {0, 1}, 8, 8, 32, "Flash"},
  {{0, 130, 131, 400}, {0, 130, 131, 400}, 32, 4, 128, "Flash"},
  {{0, 77, 200}, {0, 77, 200}, 12, 2, 32, "Flash"},
  {{0, 3, 8}, {0, 60, 93}, 8, 2, 64, "Flash"}, // fewer queries than keys
  {{0, 9, 17}, {0, 9, 17}, 6, 3, 20, "matrix"}, // no fused kernel for this head size
  {rows(2, 256), rows(2, 256), 16, 16, 192, "cuDNN", 128}, // DeepSeek's latent attention
  {{0, 130, 131, 400}, {0, 130, 131, 400}, 16, 16, 192, "Flash", 128},
  {{0, 3, 8}, {0, 60, 93}, 16, 16, 192, "Flash", 128},
  {rows(2, 128), rows(2, 128), 4, 2, 160, "Flash", 64}, // two sizes that cuDNN is not asked for
  {{0, 77, 200}, {0, 77, 200}, 4, 4, 32, "Flash", 64},
  {{0, 9, 17}, {0, 9, 17}, 6, 3, 20, "matrix", 12},
};

Operator attention_of(const Case& c) {
  return [&c](const std::vector<Tensor>& x, std::vector<Parameter>&) {
    return attention(x[0], x[1], x[2], make_span(c.cu_q, c.cu_k, x[0].device()), 0.2);
  };
}

std::vector<Tensor> inputs(const Case& c, at::ScalarType dtype) {
  return {random_tensor("q", {c.cu_q.back(), c.heads, c.dim}, dtype),
    random_tensor("k", {c.cu_k.back(), c.kv_heads, c.dim}, dtype),
    random_tensor("v", {c.cu_k.back(), c.kv_heads, c.v_dim}, dtype)};
}

// Windows that cut documents and sinks, of GPT-OSS' head size and of one without a fused kernel.
TEST(AttentionGpu, WindowsAndSinks) {
  const Case cases[] = {{{0, 130, 131, 400}, {0, 130, 131, 400}, 16, 2, 64, ""},
    {rows(2, 256), rows(2, 256), 8, 8, 64, ""}, {{0, 3, 8}, {0, 60, 93}, 8, 2, 64, ""},
    {{0, 9, 17}, {0, 9, 17}, 6, 3, 20, ""}, {{0, 1, 2}, {0, 40, 140}, 8, 2, 64, ""}};
  for (const Case& c: cases) {
    for (const int64_t window: {0, 1, 5, 128}) {
      SCOPED_TRACE(fmt::format("{} queries, {} heads, window {}", c.cu_q.back(), c.heads, window));
      const Operator f = [&](const std::vector<Tensor>& x, std::vector<Parameter>& p) {
        const AttentionSpan span = make_span(c.cu_q, c.cu_k, x[0].device());
        return attention(x[0], x[1], x[2], span, 0.2, {window, &p[0]});
      };
      const std::vector<Tensor> sinks{random_tensor("sinks", {c.heads}, at::kBFloat16)};
      for (const at::ScalarType dtype: {at::kFloat, at::kBFloat16}) {
        const auto x = inputs(c, dtype);
        const Tensor cotangent = random_tensor("cotangent", x[0].sizes().vec(), dtype);
        const auto exact = run_operator(f, x, sinks, at::kDouble, at::kCPU, cotangent);
        poison();
        const auto got = run_operator(f, x, sinks, dtype, kGpu, cotangent);
        for (size_t i = 0; i < exact.tensors.size(); ++i)
          expect_close(
            got.tensors[i], exact.tensors[i], dtype == at::kFloat ? 2e-5 : 0.02, exact.names[i]);
        // Decoding, where no gradient is wanted, may take another kernel.
        const at::NoGradGuard no_grad;
        expect_close(run_operator(f, x, sinks, dtype, kGpu, {}).tensors[0], exact.tensors[0],
          dtype == at::kFloat ? 2e-5 : 0.02, "without gradients");
      }
    }
  }
}

// deterministicAlgorithms for a scope, without LibTorch's filling of new memory.
struct Deterministic {
  explicit Deterministic(bool on) { at::globalContext().setDeterministicAlgorithms(on, false); }
  ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

TEST(AttentionGpu, MatchesTheReference) {
  for (const Case& c: kCases) {
    for (at::ScalarType dtype: {at::kFloat, at::kBFloat16}) {
      for (bool deterministic: {false, true}) {
        if (deterministic && dtype == at::kFloat) continue;
        SCOPED_TRACE(fmt::format("{} heads over {}, {} queries, head size {}, {}", c.heads,
          c.kv_heads, c.cu_q.back(), c.dim, dtype_name(dtype)));
        const auto x = inputs(c, dtype);
        const Tensor cotangent =
          random_tensor("cotangent", {x[0].size(0), c.heads, c.v_dim}, dtype);
        const auto exact = run_operator(attention_of(c), x, {}, at::kDouble, at::kCPU, cotangent);
        poison();
        const Deterministic scope(deterministic);
        const AttentionSpan span = make_span(c.cu_q, c.cu_k, kGpu);
        const std::string path = attention_path(x[0].to(kGpu), x[2].to(kGpu), span);
        if (dtype == at::kFloat) {
          EXPECT_TRUE(path.starts_with("matrix")) << path;
        } else {
          EXPECT_TRUE(path.starts_with(deterministic && c.path == "cuDNN" ? "Flash" : c.path))
            << path;
        }
        const auto got = run_operator(attention_of(c), x, {}, dtype, kGpu, cotangent);
        // The fused kernels round probabilities and their gradients to BF16 (2^-9) before the
        // second product, and sum hundreds of such terms.
        const double noise = dtype == at::kFloat ? 2e-5 : 0.01;
        for (size_t i = 0; i < exact.tensors.size(); ++i) {
          expect_close(got.tensors[i], exact.tensors[i], noise, exact.names[i]);
        }
        if (!deterministic) continue;
        const auto again = run_operator(attention_of(c), x, {}, dtype, kGpu, cotangent);
        for (size_t i = 0; i < exact.tensors.size(); ++i) {
          EXPECT_TRUE(at::equal(got.tensors[i], again.tensors[i])) << exact.names[i] << " repeats";
        }
      }
    }
  }
}

// Parts of an attention: causal squares, and queries that see all keys of a part, fewer or more of
// them than queries. The backward is given log-sum-exps and outputs of more keys than the part's.
TEST(AttentionGpu, PartsMatchTheReference) {
  struct Part {
    std::vector<int32_t> cu_q, cu_k;
    bool causal;
    int64_t heads, kv_heads, dim;
    int64_t v_dim = dim;
  };
  const Part parts[] = {
    {rows(2, 256), rows(2, 256), true, 32, 4, 128}, // cuDNN
    {rows(1, 256), rows(1, 128), false, 32, 4, 128}, // cuDNN, a low chunk's keys
    {rows(3, 128), rows(3, 256), false, 12, 2, 64}, // cuDNN, a high chunk's queries
    {{0, 130, 131, 400}, {0, 130, 131, 400}, true, 8, 2, 128},
    {{0, 130, 131, 400}, {0, 7, 90, 300}, false, 8, 2, 128},
    {{0, 1, 2, 5}, {0, 100, 101, 340}, false, 8, 2, 64},
    {{0, 1, 2}, {0, 1, 2}, false, 32, 4, 128},
    {{0, 9, 17}, {0, 3, 30}, false, 6, 3, 20}, // products
    {rows(2, 256), rows(2, 256), true, 16, 16, 192, 128},
    {rows(1, 256), rows(1, 128), false, 16, 16, 192, 128},
    {{0, 130, 131, 400}, {0, 7, 90, 300}, false, 16, 16, 192, 128},
  };
  for (const Part& c: parts) {
    for (const at::ScalarType dtype: {at::kFloat, at::kBFloat16}) {
      for (const bool deterministic: {false, true}) {
        SCOPED_TRACE(fmt::format("{} queries over {} keys, head size {}, causal {}, {}",
          c.cu_q.back(), c.cu_k.back(), c.dim, c.causal, dtype_name(dtype)));
        const Deterministic scope(deterministic);
        const std::vector<int64_t> q_shape{c.cu_q.back(), c.heads, c.dim};
        const std::vector<int64_t> k_shape{c.cu_k.back(), c.kv_heads, c.dim};
        const Tensor q = random_tensor("q", q_shape, dtype), k = random_tensor("k", k_shape, dtype);
        const std::vector<int64_t> out_shape{c.cu_q.back(), c.heads, c.v_dim};
        const Tensor v = random_tensor("v", {c.cu_k.back(), c.kv_heads, c.v_dim}, dtype);
        const Tensor dout = random_tensor("dout", out_shape, dtype);
        const auto run = [&](at::Device device, at::ScalarType type, const AttentionPart& whole) {
          const auto to = [&](const Tensor& x) { return x.to(device, type); };
          const AttentionSpan span = make_span(c.cu_q, c.cu_k, device);
          const AttentionPart part = attention_part(to(q), to(k), to(v), span, c.causal, 0.2);
          if (!whole.out.defined()) return std::vector<Tensor>{part.out, part.lse};
          const auto lse_type = type == at::kDouble ? at::kDouble : at::kFloat;
          const auto grad = attention_part_backward(to(dout), to(q), to(k), to(v),
            {to(whole.out), whole.lse.to(device, lse_type)}, span, c.causal, 0.2);
          return std::vector<Tensor>{part.out, part.lse, grad[0], grad[1], grad[2]};
        };
        const Tensor lse = run(at::kCPU, at::kDouble, {})[1] + 0.5;
        const AttentionPart whole{random_tensor("out", out_shape, dtype, 0.1), lse};
        const auto exact = run(at::kCPU, at::kDouble, whole);
        poison();
        const auto got = run(kGpu, dtype, whole);
        const char* names[] = {"out", "lse", "dq", "dk", "dv"};
        for (size_t i = 0; i < exact.size(); ++i)
          expect_close(got[i], exact[i], dtype == at::kFloat ? 2e-5 : 0.01, names[i]);
      }
    }
  }
}

// Known fault 35, on the packed kernel: documents without tokens change neither results nor
// gradients.
TEST(AttentionGpu, EmptyDocumentsAddNothing) {
  const Deterministic scope(true);
  const Case with{{0, 0, 5, 5, 12, 12}, {0, 0, 5, 5, 12, 12}, 8, 2, 64, ""};
  const Case without{{0, 5, 12}, {0, 5, 12}, 8, 2, 64, ""};
  const auto x = inputs(with, at::kBFloat16);
  const Tensor cotangent = random_tensor("cotangent", x[0].sizes().vec(), at::kBFloat16);
  const auto a = run_operator(attention_of(with), x, {}, at::kBFloat16, kGpu, cotangent);
  const auto b = run_operator(attention_of(without), x, {}, at::kBFloat16, kGpu, cotangent);
  for (size_t i = 0; i < a.tensors.size(); ++i)
    EXPECT_TRUE(at::equal(a.tensors[i], b.tensors[i])) << i;
}

// Slices of a fused projection, in both fused kernels: strides other than those of a contiguous
// tensor.
TEST(AttentionGpu, TakesSlicesOfAFusedProjection) {
  for (const auto& cu: {rows(2, 128), std::vector<int32_t>{0, 100, 256}}) {
    Tensor fused =
      random_tensor("qkv", {256, 16, 64}, at::kBFloat16).to(kGpu).set_requires_grad(true);
    Tensor copy = fused.detach().clone().set_requires_grad(true);
    const AttentionSpan span = make_span(cu, kGpu);
    const Deterministic scope(true);
    auto run = [&](const Tensor& x, bool contiguous) {
      auto slice = [&](int64_t first, int64_t count) {
        const Tensor part = x.narrow(1, first, count);
        return contiguous ? part.contiguous() : part;
      };
      return attention(slice(0, 8), slice(8, 4), slice(12, 4), span, 0.125);
    };
    const Tensor strided = run(fused, false), dense = run(copy, true);
    EXPECT_TRUE(at::equal(strided, dense));
    strided.sum().backward();
    dense.sum().backward();
    EXPECT_TRUE(at::equal(fused.grad(), copy.grad()));
  }
}

TEST(AttentionGpu, CudnnTakesSlicesOfAFusedProjection) {
  const Tensor fused = random_tensor("qkv", {256, 16, 64}, at::kBFloat16).to(kGpu);
  const AttentionSpan span = make_span(rows(2, 128), kGpu);
  auto slice = [&](int64_t first, int64_t count) { return fused.narrow(1, first, count); };
  const Tensor strided = attention(slice(0, 8), slice(8, 4), slice(12, 4), span, 0.125);
  const Tensor dense = attention(
    slice(0, 8).contiguous(), slice(8, 4).contiguous(), slice(12, 4).contiguous(), span, 0.125);
  expect_close(strided, dense.cpu(), 0.01, "strided");
}

// A decoding batch: one query a document, keys of any number; the last row of the full result.
TEST(AttentionGpu, DecodingContinuesTheFullResult) {
  const Case c{{0, 40, 97}, {0, 40, 97}, 8, 2, 64, ""};
  const auto x = inputs(c, at::kBFloat16);
  const at::NoGradGuard no_grad;
  const Tensor q = x[0].to(kGpu), k = x[1].to(kGpu), v = x[2].to(kGpu);
  const Tensor full = attention(q, k, v, make_span(c.cu_q, kGpu), 0.2);
  const Tensor last = at::cat({q.narrow(0, 39, 1), q.narrow(0, 96, 1)});
  const Tensor out = attention(last, k, v, make_span({0, 1, 2}, c.cu_k, kGpu), 0.2);
  const Tensor wanted = at::cat({full.narrow(0, 39, 1), full.narrow(0, 96, 1)}).cpu();
  expect_close(out, wanted, 0.01, "last rows");
  // A document between them that has ended: keys, but no query.
  const AttentionSpan ended = make_span({0, 1, 1, 2}, {0, 40, 50, 107}, kGpu);
  auto with_gap = [](
                    const Tensor& t) { return at::cat({t.narrow(0, 0, 50), t.narrow(0, 40, 57)}); };
  expect_close(
    attention(last, with_gap(k), with_gap(v), ended, 0.2), wanted, 0.01, "ended document");
}

} // namespace
} // namespace pith::test
