#include "operators/attention.h"
#include <ATen/Context.h>
#include <ATen/ops/_cudnn_attention_backward.h>
#include <ATen/ops/_cudnn_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include "operators/function.h"

namespace pith {
namespace {
struct Mask {
  bool causal; // none after its own; else all
  int64_t before = -1; // with causal: at most so many before; -1: all
};

// Consecutive documents of one shape, computed as a batch.
struct Run {
  int64_t first_q, first_k; // rows where it starts
  int64_t count, n, m; // documents; queries and keys of each
  Mask mask;
};

// Calls f(document, first query, queries, first key, keys).
template <class F> void for_documents(const AttentionSpan& span, F&& f) {
  const int32_t* q = span.cu_q_host.const_data_ptr<int32_t>();
  const int32_t* k = span.cu_k_host.const_data_ptr<int32_t>();
  for (int64_t d = 0; d + 1 < span.cu_q_host.numel(); ++d)
    f(d, q[d], q[d + 1] - q[d], k[d], k[d + 1] - k[d]);
}

// Documents with queries, neighbours of one shape together; at most `limit` scores (n * m) a run.
vector<Run> runs_of(const AttentionSpan& span, const Mask& mask, int64_t limit) {
  vector<Run> runs;
  for_documents(span, [&](int64_t, int64_t first_q, int64_t n, int64_t first_k, int64_t m) {
    if (n == 0) return;
    if (!runs.empty()) {
      Run& last = runs.back();
      if (last.n == n && last.m == m && last.first_k + last.count * m == first_k &&
        (last.count + 1) * n * m <= limit) {
        ++last.count;
        return;
      }
    }
    runs.push_back({first_q, first_k, 1, n, m, mask});
  });
  return runs;
}

enum class Path { cudnn, flash, cpu, products };

bool equal_documents(const AttentionSpan& span, const Mask& mask) {
  const auto runs = runs_of(span, mask, INT64_MAX);
  return runs.size() == 1 && runs[0].count == span.cu_q_host.numel() - 1 &&
    (!mask.causal || runs[0].n == runs[0].m);
}

bool round_length(int64_t length) { return length >= 128 && length % 128 == 0; }

Path choose_path(const Tensor& q, const Tensor& v, const AttentionSpan& span, const Mask& mask) {
  if (q.is_cpu()) return mask.before >= 0 ? Path::products : Path::cpu;
  const int64_t dim = q.size(2), v_dim = v.size(2), widest = max(dim, v_dim);
  const bool half = is_bf16(q) || q.scalar_type() == kHalf;
  const bool fits = dim % 8 == 0 && v_dim % 8 == 0 && widest <= 256;
  if (!half || !fits || q.size(0) == 0) return Path::products;
  // cuDNN is the fastest, but its backward is not deterministic, and LibTorch builds a plan (about
  // 70 ms) for each new shape: only for the fixed, round lengths of packed pretraining rows. It
  // takes both head sizes of DeepSeek's latent attention.
  const bool cudnn = (widest <= 128 || (dim == 192 && v_dim == 128)) && round_length(span.max_q) &&
    round_length(span.max_k) && equal_documents(span, mask) && mask.before < 0 &&
    !at::globalContext().deterministicAlgorithms();
  return cudnn ? Path::cudnn : Path::flash;
}

// Scores a run may hold: products keep all (256 MiB in FP32), the others none.
vector<Run> runs_for(Path path, const Tensor& q, const AttentionSpan& span, const Mask& mask) {
  return runs_of(span, mask,
    path == Path::products ? (int64_t{1} << 26) / max<int64_t>(1, q.size(1)) : INT64_MAX);
}

// FlashAttention and the blocked CPU kernel know one head size: zeros fill smaller ones.
bool needs_padding(Path path, const Tensor& q, const Tensor& v) {
  return (path == Path::flash || path == Path::cpu) && q.size(2) != v.size(2);
}
Tensor pad(const Tensor& x, int64_t dim) {
  return x.size(2) == dim ? x : at::constant_pad_nd(x, {0, dim - x.size(2)});
}
Tensor cut(const Tensor& x, int64_t dim) { return x.narrow(2, 0, dim).contiguous(); }

// LibTorch's blocked CPU kernel aligns causal documents at their beginnings.
bool is_blocked(Path path, const Run& run) {
  return path == Path::cpu && (run.n == run.m || !run.mask.causal);
}

// (count * n, heads, D) -> (count, heads * repeat, n, D)
Tensor batch_heads(const Tensor& x, int64_t count, int64_t repeat = 1) {
  Tensor view = x.view({count, -1, x.size(1), x.size(2)}).transpose(1, 2);
  if (repeat == 1) return view;
  return view.unsqueeze(2)
    .expand({-1, -1, repeat, -1, -1})
    .reshape({count, -1, view.size(2), x.size(2)});
}

// The inverse; repeated heads are summed.
Tensor unbatch_heads(const Tensor& x, int64_t repeat = 1) {
  const Tensor heads =
    repeat == 1 ? x : x.view({x.size(0), -1, repeat, x.size(2), x.size(3)}).sum(2);
  return heads.transpose(1, 2).reshape({-1, heads.size(1), heads.size(3)});
}

// --- Products: decoding on a CPU, FP32 on a GPU. The heads of a group are stacked. ---

// (count * n, heads, D) -> (count, groups, heads / groups * n, D)
Tensor stack_heads(const Tensor& x, int64_t count, int64_t groups) {
  return widen(batch_heads(x, count).reshape({count, groups, -1, x.size(2)}));
}

// The inverse, into rows of `heads` heads.
Tensor unstack_heads(const Tensor& x, int64_t heads) {
  return unbatch_heads(x.reshape({x.size(0), heads, -1, x.size(3)}));
}

// q, k stacked -> scale * q k^T, -inf where masked: (count, groups, q's rows, m).
Tensor masked_scores(const Tensor& q, const Tensor& k, const Run& run, double scale) {
  Tensor scores = at::matmul(q, k.transpose(2, 3)).mul_(scale);
  const int64_t n = run.n, m = run.m;
  if (run.mask.causal && (n > 1 || run.mask.before >= 0)) {
    const Tensor all = at::ones({n, m}, q.options().dtype(kBool));
    Tensor hidden = all.triu(m - n + 1);
    if (run.mask.before >= 0) hidden.logical_or_(all.tril(m - n - 1 - run.mask.before));
    scores.view({-1, n, m}).masked_fill_(hidden, -numeric_limits<double>::infinity());
  }
  return scores;
}

AttentionPart products_forward(
  const Tensor& q, const Tensor& k, const Tensor& v, const Run& run, double scale) {
  const auto stack = [&](const Tensor& x) { return stack_heads(x, run.count, k.size(1)); };
  Tensor p = masked_scores(stack(q), stack(k), run, scale);
  const Tensor lse = at::logsumexp(p, -1, true);
  p.sub_(lse).exp_();
  return {unstack_heads(at::matmul(p, stack(v)), q.size(1)), unstack_heads(lse, q.size(1))};
}

// dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = scale dS K, dK = scale dS^T Q.
AttentionGradients products_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
  const Tensor& v, const AttentionPart& part, const Run& run, double scale) {
  const auto stack = [&](const Tensor& x) { return stack_heads(x, run.count, k.size(1)); };
  const Tensor qs = stack(q), ks = stack(k), d = stack(dout);
  const Tensor p = masked_scores(qs, ks, run, scale).sub_(stack(part.lse)).exp_();
  Tensor ds = at::matmul(d, stack(v).transpose(2, 3));
  ds.sub_((d * stack(part.out)).sum(-1, true)).mul_(p).mul_(scale);
  return {unstack_heads(at::matmul(ds, ks), q.size(1)),
    unstack_heads(at::matmul(ds.transpose(2, 3), qs), k.size(1)),
    unstack_heads(at::matmul(p.transpose(2, 3), d), k.size(1))};
}

// --- One run: LibTorch's blocked CPU kernel, cuDNN ---

AttentionPart run_forward(
  Path path, const Tensor& q, const Tensor& k, const Tensor& v, const Run& run, double scale) {
  const int64_t count = run.count, repeat = q.size(1) / k.size(1);
  if (path == Path::cudnn) {
    const auto result = at::_cudnn_attention_forward(batch_heads(q, count), batch_heads(k, count),
      batch_heads(v, count), {}, {}, {}, run.n, run.m, /*compute_log_sumexp=*/true, 0.0,
      run.mask.causal, false, scale);
    return {unbatch_heads(std::get<0>(result)),
      unbatch_heads(std::get<1>(result).view({count, q.size(1), run.n, 1}))};
  }
  if (!is_blocked(path, run)) return products_forward(q, k, v, run, scale);
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(batch_heads(q, count),
    batch_heads(k, count, repeat), batch_heads(v, count, repeat), 0.0, run.mask.causal, {}, scale);
  return {unbatch_heads(out), unbatch_heads(lse.unsqueeze(3))};
}

AttentionGradients run_backward(Path path, const Tensor& dout, const Tensor& q, const Tensor& k,
  const Tensor& v, const AttentionPart& part, const Run& run, double scale) {
  if (path != Path::cudnn && !is_blocked(path, run))
    return products_backward(dout, q, k, v, part, run, scale);
  const int64_t count = run.count, repeat = path == Path::cudnn ? 1 : q.size(1) / k.size(1);
  const auto batch = [&](const Tensor& x) { return batch_heads(x, count); };
  const Tensor keys = batch_heads(k, count, repeat), values = batch_heads(v, count, repeat);
  Tensor dq, dk, dv;
  if (path == Path::cudnn) {
    const Tensor unused = at::empty({2}, q.options().dtype(kLong)); // without dropout
    std::tie(dq, dk, dv) = at::_cudnn_attention_backward(batch(dout), batch(q), keys, values,
      batch(part.out), batch(part.lse).contiguous(), unused, unused, {}, {}, {}, run.n, run.m, 0.0,
      run.mask.causal, scale);
  } else {
    std::tie(dq, dk, dv) =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(batch(dout), batch(q), keys, values,
        batch(part.out), batch(part.lse).squeeze(3), 0.0, run.mask.causal, {}, scale);
  }
  return {unbatch_heads(dq), unbatch_heads(dk, repeat), unbatch_heads(dv, repeat)};
}

Tensor rows_q(const Tensor& x, const Run& r) { return x.narrow(0, r.first_q, r.count * r.n); }
Tensor rows_k(const Tensor& x, const Run& r) { return x.narrow(0, r.first_k, r.count * r.m); }

// `record`: a backward pass will follow.
AttentionPart forward(Path path, const Tensor& q, const Tensor& k, const Tensor& v,
  const AttentionSpan& span, const Mask& mask, double scale, bool record) {
  const NoGradGuard no_grad;
  if (needs_padding(path, q, v)) {
    const int64_t dim = max(q.size(2), v.size(2));
    const AttentionPart part =
      forward(path, pad(q, dim), pad(k, dim), pad(v, dim), span, mask, scale, record);
    return {cut(part.out, v.size(2)), part.lse};
  }
  if (path == Path::flash) {
    // At max_q = 1 the kernel may swap heads and queries: fast decoding, but only right for one
    // query in every document, and unknown to its backward.
    const bool one_each = !record && q.size(0) == span.cu_q.numel() - 1;
    const auto result = at::_flash_attention_forward(q, k, v, span.cu_q, span.cu_k,
      one_each ? span.max_q : max<int64_t>(span.max_q, 2), span.max_k, 0.0, mask.causal, false,
      scale, mask.before);
    return {std::get<0>(result), std::get<1>(result).t().unsqueeze(2)}; // lse from (Hq, Tq)
  }
  const auto runs = runs_for(path, q, span, mask);
  if (runs.size() == 1)
    return run_forward(path, q, rows_k(k, runs[0]), rows_k(v, runs[0]), runs[0], scale);
  const auto wide = q.options().dtype(wide_dtype(q.scalar_type()));
  AttentionPart all{
    at::empty({q.size(0), q.size(1), v.size(2)}, wide), at::empty({q.size(0), q.size(1), 1}, wide)};
  for (const Run& run: runs) {
    const AttentionPart part =
      run_forward(path, rows_q(q, run), rows_k(k, run), rows_k(v, run), run, scale);
    rows_q(all.out, run).copy_(part.out);
    rows_q(all.lse, run).copy_(part.lse);
  }
  return all;
}

AttentionGradients backward(Path path, const Tensor& dout, const Tensor& q, const Tensor& k,
  const Tensor& v, const AttentionPart& whole, const AttentionSpan& span, const Mask& mask,
  double scale) {
  if (needs_padding(path, q, v)) {
    const int64_t dim = max(q.size(2), v.size(2));
    const auto [dq, dk, dv] = backward(path, pad(dout, dim), pad(q, dim), pad(k, dim), pad(v, dim),
      {pad(whole.out, dim), whole.lse}, span, mask, scale);
    return {cut(dq, q.size(2)), cut(dk, q.size(2)), cut(dv, v.size(2))};
  }
  if (path == Path::flash) {
    const Tensor unused = at::empty({2}, q.options().dtype(kLong)); // without dropout
    auto [dq, dk, dv] = at::_flash_attention_backward(dout, q, k, v, whole.out,
      whole.lse.squeeze(2).t().contiguous(), span.cu_q, span.cu_k, max<int64_t>(span.max_q, 2),
      span.max_k, 0.0, mask.causal, unused, unused, scale, mask.before);
    return {dq, dk, dv};
  }
  const auto runs = runs_for(path, q, span, mask);
  if (runs.size() == 1 && runs[0].count * runs[0].m == k.size(0))
    return run_backward(path, dout, q, k, v, whole, runs[0], scale);
  // Zeros: no run writes keys of documents without queries.
  const auto wide = q.options().dtype(wide_dtype(q.scalar_type()));
  AttentionGradients all{
    at::empty(q.sizes(), wide), at::zeros(k.sizes(), wide), at::zeros(v.sizes(), wide)};
  for (const Run& run: runs) {
    const auto part = run_backward(path, rows_q(dout, run), rows_q(q, run), rows_k(k, run),
      rows_k(v, run), {rows_q(whole.out, run), rows_q(whole.lse, run)}, run, scale);
    rows_q(all[0], run).copy_(part[0]);
    rows_k(all[1], run).copy_(part[1]);
    rows_k(all[2], run).copy_(part[2]);
  }
  return all;
}

// The flash kernels' backward has read out of bounds at empty documents: they get none.
AttentionSpan span_for(Path path, const AttentionSpan& span, bool record) {
  if (path != Path::flash) return span;
  vector<int32_t> cu_q{0}, cu_k{0};
  for_documents(span, [&](int64_t d, int64_t, int64_t n, int64_t, int64_t m) {
    if (n == 0 && m == 0) return;
    PITH_CHECK(!record || n > 0,
      "attention: document {} has {} keys and no queries, for which there is no backward here", d,
      m);
    cu_q.push_back(narrow<int32_t>(cu_q.back() + n));
    cu_k.push_back(narrow<int32_t>(cu_k.back() + m));
  });
  AttentionSpan kept = span;
  if (ssize(cu_q) == span.cu_q_host.numel()) return kept;
  kept.cu_q = at::tensor(cu_q, kInt).to(span.cu_q.device());
  kept.cu_k = at::tensor(cu_k, kInt).to(span.cu_q.device());
  return kept;
}
}

void check_borders(const AttentionSpan& span, int64_t rows_q, int64_t rows_k) {
  const auto check = [&](const Tensor& cu, const char* name, int64_t rows) {
    check_tensor(cu, "attention: cu_seqlens on the host", kInt, {span.cu_q_host.numel()});
    PITH_CHECK(cu.is_cpu() && cu.numel() >= 1, "attention: {}", describe(cu, "cu_seqlens"));
    const int32_t *border = cu.const_data_ptr<int32_t>(), first = border[0];
    const int32_t last = border[cu.numel() - 1];
    PITH_CHECK(first == 0 && last == rows,
      "attention: documents cover rows {}..{}, but {} has {} rows", first, last, name, rows);
  };
  check(span.cu_q_host, "q", rows_q);
  check(span.cu_k_host, "k", rows_k);
  for_documents(span, [&](int64_t d, int64_t, int64_t n, int64_t, int64_t m) {
    PITH_CHECK(n >= 0 && m >= n && n <= span.max_q && m <= span.max_k,
      "attention: document {} has {} queries and {} keys, not as many keys as queries or more; "
      "longest said to be {} and {}",
      d, n, m, span.max_q, span.max_k);
  });
}

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  check_shape(q, "attention: q", {-1, -1, -1});
  check_shape(k, "attention: k", {-1, -1, q.size(2)});
  check_shape(v, "attention: v", {k.size(0), k.size(1), -1});
  check_dtype(k, "attention: k", q.scalar_type());
  check_dtype(v, "attention: v", q.scalar_type());
  PITH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
    "attention: {} query heads over {} key heads", q.size(1), k.size(1));
}

// In lse's dtype and shape (Tq, Hq, 1).
Tensor sink_logits(const Parameter& sinks, const Tensor& lse) {
  check_shape(sinks.value, sinks.name, {lse.size(1)});
  return sinks.value.detach().to(lse.scalar_type()).view({1, -1, 1});
}

AttentionPart with_sinks(const AttentionPart& part, const Parameter* sinks) {
  if (sinks == nullptr) return part;
  const NoGradGuard no_grad;
  const Tensor s = sink_logits(*sinks, part.lse);
  return {part.out * at::sigmoid(part.lse - s), at::logaddexp(part.lse, s)};
}

void add_sink_gradient(const Parameter* sinks, const Tensor& dout, const AttentionPart& whole) {
  if (sinks == nullptr) return;
  const Tensor share = (sink_logits(*sinks, whole.lse) - whole.lse).exp_(); // of the softmax
  const Tensor product = (widen(dout) * whole.out).sum(-1, /*keepdim=*/true);
  sinks->grad.sub_(share.mul_(product).sum(0).view(-1));
}

Tensor attention(const Tensor& given_q, const Tensor& given_k, const Tensor& given_v,
  const AttentionSpan& given, double scale, const AttentionOptions& options) {
  check_attention(given_q, given_k, given_v);
  check_borders(given, given_q.size(0), given_k.size(0));
  const auto packed = [](const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  const Tensor q = packed(given_q), k = packed(given_k), v = packed(given_v);
  const bool needed =
    at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  // A window as long as the longest document is none.
  const Mask mask{true, options.window < given.max_k ? options.window - 1 : -1};
  const Path path = choose_path(q, v, given, mask);
  const AttentionSpan span = span_for(path, given, needed);
  const Parameter* sinks = options.sinks;
  const AttentionPart part =
    with_sinks(forward(path, q, k, v, span, mask, scale, needed || sinks), sinks);
  const Tensor out = part.out.to(q.scalar_type());
  const AttentionPart kept{out.detach(), part.lse};
  return record(out, {q, k, v}, [=](const Tensor& dout) {
    add_sink_gradient(sinks, dout, kept);
    const auto grad = backward(path, dout.contiguous(), q, k, v, kept, span, mask, scale);
    const auto dtype = q.scalar_type();
    return Tensors{grad[0].to(dtype), grad[1].to(dtype), grad[2].to(dtype)};
  });
}

// More than one part will be added up: FP32 on the CPU.
Tensor of_part(const Tensor& x) { return x.is_cpu() ? widen(x) : x; }

AttentionPart attention_part(const Tensor& q, const Tensor& k, const Tensor& v,
  const AttentionSpan& span, bool causal, double scale) {
  const Path path = choose_path(q, v, span, {causal});
  return forward(path, of_part(q), of_part(k), of_part(v), span_for(path, span, true), {causal},
    scale, /*record=*/true);
}

AttentionGradients attention_part_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
  const Tensor& v, const AttentionPart& whole, const AttentionSpan& span, bool causal,
  double scale) {
  const Path path = choose_path(q, v, span, {causal});
  return backward(path, of_part(dout), of_part(q), of_part(k), of_part(v),
    {of_part(whole.out), whole.lse}, span_for(path, span, true), {causal}, scale);
}

const char* attention_path(const Tensor& q, const Tensor& v, const AttentionSpan& span) {
  constexpr const char* kNames[] = {"cuDNN attention, dense batches of equal documents",
    "FlashAttention 2, packed documents", "blocked CPU attention per run of equal documents",
    "matrix products per document"};
  return kNames[size_t(choose_path(q, v, span, {true}))];
}
}
