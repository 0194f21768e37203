#include "operators/attention.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_cudnn_attention_backward.h>
#include <ATen/ops/_cudnn_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

#include "operators/matmul.h"

namespace pith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A run of consecutive documents of one shape, computed as a batch.
struct Run {
  int64_t first_q, first_k;  // rows where it starts
  int64_t count, n, m;       // documents; queries and keys of each
  bool causal = true;
};

// Documents with queries, neighbours of equal shape together, at most `limit` scores (n * m) in a
// run.
std::vector<Run> runs_of(const Tensor& cu_q_host, const Tensor& cu_k_host, int64_t limit) {
  const int32_t *q = cu_q_host.const_data_ptr<int32_t>(), *k = cu_k_host.const_data_ptr<int32_t>();
  std::vector<Run> runs;
  for (int64_t d = 0; d + 1 < cu_q_host.numel(); ++d) {
    const int64_t n = q[d + 1] - q[d], m = k[d + 1] - k[d];
    if (n == 0) continue;
    const bool joins = !runs.empty() && runs.back().n == n && runs.back().m == m &&
                       runs.back().first_k + runs.back().count * m == k[d] &&
                       (runs.back().count + 1) * n * m <= limit;
    if (joins) {
      ++runs.back().count;
    } else {
      runs.push_back({.first_q = q[d], .first_k = k[d], .count = 1, .n = n, .m = m});
    }
  }
  return runs;
}

// --- The choice of kernel ---

enum class Path { cudnn, flash, cpu, products };

bool equal_documents(const AttentionSpan& span, bool causal) {
  const auto runs = runs_of(span.cu_q_host, span.cu_k_host, std::numeric_limits<int64_t>::max());
  const int64_t documents = span.cu_q_host.numel() - 1;
  return runs.size() == 1 && runs[0].count == documents && (!causal || runs[0].n == runs[0].m);
}

bool round_length(int64_t length) { return length >= 128 && length % 128 == 0; }

Path choose_path(const Tensor& q, const AttentionSpan& span, bool causal = true) {
  if (q.is_cpu()) return Path::cpu;
  const int64_t head_dim = q.size(2);
  const bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  if (!half || head_dim % 8 != 0 || head_dim > 256 || q.size(0) == 0) return Path::products;
  // cuDNN is the fastest, but its backward is not deterministic, and LibTorch builds a plan (about
  // 70 ms) for each new shape: so only for the fixed, round lengths of packed pretraining rows.
  const bool cudnn = head_dim <= 128 && round_length(span.max_q) && round_length(span.max_k) &&
                     equal_documents(span, causal) &&
                     !at::globalContext().deterministicAlgorithms();
  return cudnn ? Path::cudnn : Path::flash;
}

// --- Plain matrix products: decoding on a CPU, FP32 on a GPU ---

// x (count * n, heads, D) -> (count * groups, heads / groups * n, D): the heads of a group stacked.
Tensor stack_heads(const Tensor& x, int64_t count, int64_t groups) {
  const int64_t n = x.size(0) / count, per_group = x.size(1) / groups;
  return x.view({count, n, groups, per_group, x.size(2)})
      .permute({0, 2, 3, 1, 4})
      .reshape({count * groups, per_group * n, x.size(2)})
      .to(wide_dtype(x.scalar_type()));
}

// The inverse of stack_heads, into rows of `heads` heads.
Tensor unstack_heads(const Tensor& x, int64_t count, int64_t heads) {
  const int64_t groups = x.size(0) / count, per_group = heads / groups, n = x.size(1) / per_group;
  return x.view({count, groups, per_group, n, x.size(2)})
      .permute({0, 3, 1, 2, 4})
      .reshape({count * n, heads, x.size(2)});
}

// q, k as stacked -> scale * q k^T with -inf above the causal diagonal, (count * groups, per_group
// * n, m).
Tensor masked_scores(const Tensor& q, const Tensor& k, const Run& run, double scale) {
  Tensor scores = at::bmm(q, k.transpose(1, 2)).mul_(scale);
  const int64_t n = run.n, m = run.m;
  if (n > 1 && run.causal) {
    const Tensor hidden = at::ones({n, m}, q.options().dtype(at::kBool)).triu(m - n + 1);
    scores.view({q.size(0), -1, n, m})
        .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  }
  return scores;
}

// In the functions of a path, lse is as its kernel lays it out.
AttentionPart products_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Run& run, double scale) {
  const int64_t groups = k.size(1);
  Tensor p = masked_scores(
      stack_heads(q, run.count, groups), stack_heads(k, run.count, groups), run, scale);
  const Tensor lse = at::logsumexp(p, -1, true);
  p.sub_(lse).exp_();
  return {unstack_heads(at::bmm(p, stack_heads(v, run.count, groups)), run.count, q.size(1)), lse};
}

// dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = scale dS K, dK = scale dS^T Q.
std::array<Tensor, 3> products_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
    const Tensor& v, const AttentionPart& part, const Run& run, double scale) {
  const int64_t groups = k.size(1);
  const Tensor qs = stack_heads(q, run.count, groups), ks = stack_heads(k, run.count, groups);
  const Tensor d = stack_heads(dout, run.count, groups),
               o = stack_heads(part.out, run.count, groups);
  const Tensor p = masked_scores(qs, ks, run, scale).sub_(part.lse).exp_();
  const Tensor dv = at::bmm(p.transpose(1, 2), d);
  Tensor ds = at::bmm(d, stack_heads(v, run.count, groups).transpose(1, 2));
  ds.sub_((d * o).sum(-1, true)).mul_(p).mul_(scale);
  return {unstack_heads(at::bmm(ds, ks), run.count, q.size(1)),
      unstack_heads(at::bmm(ds.transpose(1, 2), qs), run.count, groups),
      unstack_heads(dv, run.count, groups)};
}

// --- LibTorch's blocked CPU kernel, for as many queries as keys ---

// (count * n, heads, D) -> (count, heads * repeat, n, D); each head repeated where there are fewer
// keys' heads.
Tensor batch_heads(const Tensor& x, int64_t count, int64_t repeat = 1) {
  Tensor view = x.view({count, -1, x.size(1), x.size(2)}).transpose(1, 2);
  if (repeat == 1) return view;
  return view.unsqueeze(2)
      .expand({-1, -1, repeat, -1, -1})
      .reshape({count, -1, view.size(2), x.size(2)});
}

// (count, heads * repeat, n, D) -> (count * n, heads, D), repeated heads summed.
Tensor unbatch_heads(const Tensor& x, int64_t repeat = 1) {
  const Tensor heads =
      repeat == 1 ? x : x.view({x.size(0), -1, repeat, x.size(2), x.size(3)}).sum(2);
  return heads.transpose(1, 2).reshape({-1, heads.size(1), heads.size(3)});
}

AttentionPart cpu_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Run& run, double scale) {
  if (run.n != run.m) return products_forward(q, k, v, run, scale);
  const int64_t repeat = q.size(1) / k.size(1);
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(batch_heads(q, run.count),
      batch_heads(k, run.count, repeat), batch_heads(v, run.count, repeat), 0.0,
      /*is_causal=*/true, {}, scale);
  return {unbatch_heads(out), lse};
}

std::array<Tensor, 3> cpu_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
    const Tensor& v, const AttentionPart& part, const Run& run, double scale) {
  if (run.n != run.m) return products_backward(dout, q, k, v, part, run, scale);
  const int64_t repeat = q.size(1) / k.size(1);
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      batch_heads(dout, run.count), batch_heads(q, run.count), batch_heads(k, run.count, repeat),
      batch_heads(v, run.count, repeat), batch_heads(part.out, run.count), part.lse, 0.0,
      /*is_causal=*/true, {}, scale);
  return {unbatch_heads(dq), unbatch_heads(dk, repeat), unbatch_heads(dv, repeat)};
}

// --- The fused CUDA kernels ---

// out, and what the kernel's backward needs: lse, and two tensors that matter with dropout only.
std::array<Tensor, 4> fused_forward(Path path, const Tensor& q, const Tensor& k, const Tensor& v,
    const AttentionSpan& span, int64_t max_q, bool causal, double scale) {
  if (path == Path::cudnn) {
    const int64_t documents = span.cu_q_host.numel() - 1;
    auto result = at::_cudnn_attention_forward(batch_heads(q, documents), batch_heads(k, documents),
        batch_heads(v, documents), {}, {}, {}, max_q, span.max_k, /*compute_log_sumexp=*/true, 0.0,
        causal, false, scale);
    return {unbatch_heads(std::get<0>(result)), std::get<1>(result), std::get<6>(result),
        std::get<7>(result)};
  }
  auto result = at::_flash_attention_forward(
      q, k, v, span.cu_q, span.cu_k, max_q, span.max_k, 0.0, causal, false, scale);
  return {std::get<0>(result), std::get<1>(result), std::get<2>(result), std::get<3>(result)};
}

std::array<Tensor, 3> fused_backward(Path path, const Tensor& dout, const Tensor& q,
    const Tensor& k, const Tensor& v, const AttentionPart& part, const Tensor& seed,
    const Tensor& offset, const AttentionSpan& span, bool causal, double scale) {
  if (path == Path::cudnn) {
    const int64_t documents = span.cu_q_host.numel() - 1;
    auto [dq, dk, dv] =
        at::_cudnn_attention_backward(batch_heads(dout, documents), batch_heads(q, documents),
            batch_heads(k, documents), batch_heads(v, documents), batch_heads(part.out, documents),
            part.lse, seed, offset, {}, {}, {}, span.max_q, span.max_k, 0.0, causal, scale);
    return {unbatch_heads(dq), unbatch_heads(dk), unbatch_heads(dv)};
  }
  auto [dq, dk, dv] = at::_flash_attention_backward(dout, q, k, v, part.out, part.lse, span.cu_q,
      span.cu_k, std::max<int64_t>(span.max_q, 2), span.max_k, 0.0, causal, seed, offset, scale);
  return {dq, dk, dv};
}

// --- All documents, path by path ---

// Scores that a run may hold: the blocked CPU kernel keeps none, products keep all of them (256 MiB
// in FP32).
std::vector<Run> runs_for(Path path, const Tensor& q, const AttentionSpan& span) {
  const int64_t limit = path == Path::cpu ? std::numeric_limits<int64_t>::max()
                                          : (int64_t{1} << 26) / std::max<int64_t>(1, q.size(1));
  return runs_of(span.cu_q_host, span.cu_k_host, limit);
}

Tensor rows_q(const Tensor& x, const Run& run) {
  return x.narrow(0, run.first_q, run.count * run.n);
}
Tensor rows_k(const Tensor& x, const Run& run) {
  return x.narrow(0, run.first_k, run.count * run.m);
}

// The flash kernels are kept away from empty documents, whose backward has read out of bounds in
// the past.
AttentionSpan without_empty(const AttentionSpan& span, bool record) {
  const int32_t* q = span.cu_q_host.const_data_ptr<int32_t>();
  const int32_t* k = span.cu_k_host.const_data_ptr<int32_t>();
  std::vector<int32_t> cu_q{0}, cu_k{0};
  const int64_t documents = span.cu_q_host.numel() - 1;
  for (int64_t d = 0; d < documents; ++d) {
    if (q[d + 1] == q[d] && k[d + 1] == k[d]) continue;
    PITH_CHECK(!record || q[d + 1] > q[d],
        "attention: document {} has {} keys and no queries, for which there is no backward here", d,
        k[d + 1] - k[d]);
    cu_q.push_back(q[d + 1]);
    cu_k.push_back(k[d + 1]);
  }
  if (static_cast<int64_t>(cu_q.size()) == documents + 1) return span;
  AttentionSpan kept = span;
  auto upload = [&](const std::vector<int32_t>& values) {
    Tensor host = at::empty({static_cast<int64_t>(values.size())}, span.cu_q_host.options());
    std::copy(values.begin(), values.end(), host.mutable_data_ptr<int32_t>());
    return host.to(span.cu_q.device());
  };
  kept.cu_q = upload(cu_q);
  kept.cu_k = upload(cu_k);
  return kept;
}

struct Attention : torch::autograd::Function<Attention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
      const AttentionSpan& given, double scale, bool record) {
    const Path path = choose_path(q, given);
    const AttentionSpan span = path == Path::flash ? without_empty(given, record) : given;
    variable_list saved;  // what that path's backward needs besides q, k, v, out
    Tensor out;
    if (path == Path::cudnn || path == Path::flash) {
      // At max_q = 1 the flash kernel may swap heads and queries: fast decoding, but only right for
      // one query in every document, and unknown to its backward.
      const bool one_each = !record && q.size(0) == span.cu_q.numel() - 1;
      const int64_t max_q = one_each ? span.max_q : std::max<int64_t>(span.max_q, 2);
      auto result = fused_forward(path, q, k, v, span, max_q, /*causal=*/true, scale);
      out = result[0];
      saved.assign(result.begin() + 1, result.end());
    } else {
      const auto runs = runs_for(path, q, span);
      for (const Run& run : runs) {
        AttentionPart part = (path == Path::cpu ? cpu_forward : products_forward)(
            rows_q(q, run), rows_k(k, run), rows_k(v, run), run, scale);
        saved.push_back(part.lse);
        if (runs.size() == 1) {
          out = part.out.to(q.scalar_type());  // one run has all the rows
        } else {
          if (!out.defined()) out = at::empty(q.sizes(), q.options());
          rows_q(out, run).copy_(part.out);
        }
      }
      if (!out.defined()) out = at::empty(q.sizes(), q.options());  // no queries at all
    }
    saved.insert(saved.begin(), {q, k, v, out});
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["path"] = static_cast<int64_t>(path);
    ctx->saved_data["cu"] =
        std::vector<Tensor>{span.cu_q, span.cu_k, span.cu_q_host, span.cu_k_host};
    ctx->saved_data["max_q"] = span.max_q;
    ctx->saved_data["max_k"] = span.max_k;
    ctx->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3];
    const auto path = static_cast<Path>(ctx->saved_data["path"].toInt());
    const auto cu = ctx->saved_data["cu"].toTensorVector();
    const AttentionSpan span{cu[0], cu[1], cu[2], cu[3], ctx->saved_data["max_q"].toInt(),
        ctx->saved_data["max_k"].toInt()};
    const double scale = ctx->saved_data["scale"].toDouble();
    const Tensor dout = grads[0].contiguous();
    Tensor dq, dk, dv;
    if (path == Path::cudnn || path == Path::flash) {
      auto grad = fused_backward(path, dout, q, k, v, {out, saved[4]}, saved[5], saved[6], span,
          /*causal=*/true, scale);
      dq = grad[0], dk = grad[1], dv = grad[2];
    } else {
      // Zeros where no run will write: keys of documents without queries.
      const auto runs = runs_for(path, q, span);
      const bool whole = runs.size() == 1 && runs[0].count * runs[0].m == k.size(0);
      if (!whole) {
        dq = at::empty(q.sizes(), q.options());
        dk = at::zeros(k.sizes(), k.options());
        dv = at::zeros(v.sizes(), v.options());
      }
      for (size_t i = 0; i < runs.size(); ++i) {
        const Run& run = runs[i];
        auto part = (path == Path::cpu ? cpu_backward : products_backward)(rows_q(dout, run),
            rows_q(q, run), rows_k(k, run), rows_k(v, run),
            AttentionPart{rows_q(out, run), saved[4 + i]}, run, scale);
        if (whole) {
          dq = part[0].to(q.scalar_type()), dk = part[1].to(k.scalar_type());
          dv = part[2].to(v.scalar_type());
        } else {
          rows_q(dq, run).copy_(part[0]);
          rows_k(dk, run).copy_(part[1]);
          rows_k(dv, run).copy_(part[2]);
        }
      }
    }
    return {dq, dk, dv, Tensor(), Tensor(), Tensor()};
  }
};

void check_borders(const AttentionSpan& span, int64_t rows_q, int64_t rows_k) {
  for (const Tensor* cu : {&span.cu_q_host, &span.cu_k_host}) {
    check_shape(*cu, "attention: cu_seqlens on the host", {-1});
    check_dtype(*cu, "attention: cu_seqlens on the host", at::kInt);
    PITH_CHECK(cu->is_cpu() && cu->numel() >= 1 && cu->numel() == span.cu_q_host.numel(),
        "attention: {}", describe(*cu, "cu_seqlens on the host"));
  }
  const int32_t* q = span.cu_q_host.const_data_ptr<int32_t>();
  const int32_t* k = span.cu_k_host.const_data_ptr<int32_t>();
  const int64_t documents = span.cu_q_host.numel() - 1;
  PITH_CHECK(q[0] == 0 && k[0] == 0 && q[documents] == rows_q && k[documents] == rows_k,
      "attention: documents cover queries {}..{} and keys {}..{}, but q has {} rows and k {}", q[0],
      q[documents], k[0], k[documents], rows_q, rows_k);
  for (int64_t d = 0; d < documents; ++d) {
    const int64_t n = q[d + 1] - q[d], m = k[d + 1] - k[d];
    PITH_CHECK(n >= 0 && m >= n && n <= span.max_q && m <= span.max_k,
        "attention: document {} has {} queries and {} keys (longest said to be {} and {}); "
        "it needs "
        "at least as many keys as queries",
        d, n, m, span.max_q, span.max_k);
  }
}

Tensor rows_contiguous(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

}  // namespace

Tensor attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const AttentionSpan& span, double scale) {
  check_shape(q, "attention: q", {-1, -1, -1});
  check_shape(k, "attention: k", {-1, -1, q.size(2)});
  check_shape(v, "attention: v", {k.size(0), k.size(1), q.size(2)});
  check_dtype(k, "attention: k", q.scalar_type());
  check_dtype(v, "attention: v", q.scalar_type());
  PITH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
      "attention: {} query heads over {} key heads", q.size(1), k.size(1));
  check_borders(span, q.size(0), k.size(0));
  const bool record =
      at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  return Attention::apply(
      rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), span, scale, record);
}

AttentionPart attention_part(const Tensor& q, const Tensor& k, const Tensor& v,
    const AttentionSpan& span, bool causal, double scale) {
  const Path path = choose_path(q, span, causal);
  if (path == Path::cudnn || path == Path::flash) {
    auto result =
        fused_forward(path, q, k, v, span, std::max<int64_t>(span.max_q, 2), causal, scale);
    if (path == Path::flash) return {result[0], result[1].t().unsqueeze(2)};  // from (Hq, Tq)
    const int64_t documents = span.cu_q_host.numel() - 1;
    return {result[0], unbatch_heads(result[1].view({documents, q.size(1), span.max_q, 1}))};
  }
  const auto wide = q.options().dtype(wide_dtype(q.scalar_type()));
  AttentionPart part{at::empty(q.sizes(), wide), at::empty({q.size(0), q.size(1), 1}, wide)};
  for (Run run : runs_for(Path::products, q, span)) {
    run.causal = causal;
    const AttentionPart piece =
        products_forward(rows_q(q, run), rows_k(k, run), rows_k(v, run), run, scale);
    rows_q(part.out, run).copy_(piece.out);
    rows_q(part.lse, run).copy_(unstack_heads(piece.lse, run.count, q.size(1)));
  }
  return part;
}

std::array<Tensor, 3> attention_part_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
    const Tensor& v, const AttentionPart& whole, const AttentionSpan& span, bool causal,
    double scale) {
  const Path path = choose_path(q, span, causal);
  if (path == Path::cudnn || path == Path::flash) {
    const int64_t documents = span.cu_q_host.numel() - 1;
    const Tensor lse =
        path == Path::flash ? whole.lse.squeeze(2).t() : batch_heads(whole.lse, documents);
    const Tensor unused = at::empty({2}, q.options().dtype(at::kLong));
    return fused_backward(
        path, dout, q, k, v, {whole.out, lse.contiguous()}, unused, unused, span, causal, scale);
  }
  const auto wide = q.options().dtype(wide_dtype(q.scalar_type()));
  std::array<Tensor, 3> grad{
      at::empty(q.sizes(), wide), at::empty(k.sizes(), wide), at::empty(v.sizes(), wide)};
  for (Run run : runs_for(Path::products, q, span)) {
    run.causal = causal;
    const AttentionPart part{
        rows_q(whole.out, run), stack_heads(rows_q(whole.lse, run), run.count, k.size(1))};
    const auto piece = products_backward(
        rows_q(dout, run), rows_q(q, run), rows_k(k, run), rows_k(v, run), part, run, scale);
    rows_q(grad[0], run).copy_(piece[0]);
    rows_k(grad[1], run).copy_(piece[1]);
    rows_k(grad[2], run).copy_(piece[2]);
  }
  return grad;
}

const char* attention_path(const Tensor& q, const AttentionSpan& span) {
  switch (choose_path(q, span)) {
    case Path::cudnn:
      return "cuDNN attention, dense batches of equal documents";
    case Path::flash:
      return "FlashAttention 2, packed documents";
    case Path::cpu:
      return "blocked CPU attention per run of equal documents";
    case Path::products:
      return "matrix products per document";
  }
  return "unknown";
}

}  // namespace pith
