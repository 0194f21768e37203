#include "operators/ring_attention.h"
#include <ATen/ops/logaddexp.h>
#include "operators/function.h"
#include "operators/linear.h"
#include "operators/permute.h"

namespace pith {
namespace {
// A view of neighbours, else a copy.
Tensor take(const Tensor& x, const RowSet& rows) {
  return rows.index.defined() ? x.index_select(0, rows.index) : x.narrow(0, rows.first, rows.count);
}

// After take(x, rows) was changed in place.
void put_back(Tensor x, const RowSet& rows, const Tensor& taken) {
  if (rows.index.defined()) x.index_copy_(0, rows.index, taken);
}

void add_rows(const Tensor& x, const RowSet& rows, const Tensor& values) {
  Tensor sum = take(x, rows);
  put_back(x, rows, sum.add_(values));
}

// Sends a block `by` members on; that from as far behind arrives in `received`.
Work pass_on(const Comm& context, const Tensor& sent, Tensor& received, int64_t by) {
  const int64_t size = context.size(), rank = context.rank() + size;
  vector<int64_t> to(index(size)), from(index(size));
  to[index((rank + by) % size)] = from[index((rank - by) % size)] = sent.size(0);
  received = at::empty_like(sent);
  return context.all_to_all_async(received, sent, from, to);
}

// at::cat of the last dimension, in 16-byte elements where they fit: on CUDA four times as fast.
Tensor cat_last(const Tensor& a, const Tensor& b) {
  const int64_t each = 16 / a.element_size();
  const auto fits = [&](const Tensor& x) {
    const auto whole = [&](int64_t n) { return n % each == 0; };
    return x.stride(-1) == 1 && whole(x.size(-1)) && whole(x.storage_offset()) &&
      ranges::all_of(x.strides().slice(0, index(x.dim() - 1)), whole);
  };
  if (!a.is_cuda() || !fits(a) || !fits(b)) return at::cat({a, b}, -1);
  return at::cat({a.view(at::kComplexDouble), b.view(at::kComplexDouble)}, -1)
    .view(a.scalar_type());
}

// What goes round, a row a token: keys of `dim` elements and values, (T, Hkv, D + Dv) ...
struct PlainKeys {
  int64_t dim;

  array<Tensor, 2> parts(const Tensor& rows) const {
    return {rows.narrow(2, 0, dim), rows.narrow(2, dim, rows.size(2) - dim)};
  }
  array<Tensor, 2> expand(const Tensor& rows) const { return parts(rows); }
  static Tensor contract(const Tensor&, const Tensor& dk, const Tensor& dv, ScalarType dtype) {
    return at::cat({dk.to(dtype), dv.to(dtype)}, 2);
  }
};

// ... or latents and rotary keys, (T, R + Dr), of which every rank makes keys and values.
struct LatentRows {
  Parameter* up;
  int64_t heads, v_dim;

  array<Tensor, 2> parts(const Tensor& rows) const {
    const int64_t rank = up->value.size(1);
    return {rows.narrow(1, 0, rank), rows.narrow(1, rank, rows.size(1) - rank)};
  }
  array<Tensor, 2> expand(const Tensor& rows) const {
    const auto [latent, rotary_key] = parts(rows);
    return expand_latent(latent.contiguous(), rotary_key, *up, heads, v_dim);
  }
  Tensor contract(const Tensor& rows, const Tensor& dk, const Tensor& dv, ScalarType dtype) const {
    const auto [latent, rotary_key] = parts(rows);
    const int64_t shared = rotary_key.size(1), plain = dk.size(2) - shared;
    const Tensor dkv = cat_last(dk.narrow(2, 0, plain), dv).flatten(1).to(rows.scalar_type());
    if (up->value.requires_grad()) add_or_defer({up, dkv, latent.contiguous(), {}});
    return cat_last(
      multiply(dkv, up->value, dtype), widen(dk.narrow(2, plain, shared)).sum(1).to(dtype));
  }
};

// In FP32. The GPU kernels give BF16: of two ranks' parts the sum in BF16 is the same.
ScalarType sum_dtype(const Tensor& q, const vector<RingStep>& ring) {
  return q.is_cuda() && ring.size() <= 2 ? q.scalar_type() : wide_dtype(q.scalar_type());
}

// Over all keys. block: this rank's rows, then the last that came round.
template <class Keys> AttentionPart forward(const Tensor& q, Tensor& block, const Keys& keys,
  const vector<RingStep>& ring, double scale, const Comm& context, const Parameter* sinks) {
  PITH_CHECK(ssize(ring) == context.size() && ring[0].queries.count == q.size(0),
    "ring_attention: q has {} tokens on {} ranks, but the micro-batch was split for {} "
    "tokens on {} ranks",
    q.size(0), context.size(), ring.empty() ? 0 : ring[0].queries.count, ring.size());
  const NoGradGuard no_grad;
  AttentionPart whole;
  for (size_t i = 0; i < ring.size(); ++i) {
    const RingStep& step = ring[i];
    Tensor next = block;
    Work travel;
    if (i + 1 < ring.size()) travel = pass_on(context, block, next, 1);
    if (step.queries.count > 0 || i == 0) {
      const auto [k, v] = keys.expand(take(block, step.keys));
      check_attention(q, k, v);
      const AttentionPart part =
        attention_part(take(q, step.queries), k, v, step.span, /*causal=*/i == 0, scale);
      if (i > 0) merge(whole, step.queries, part);
      else whole = {part.out.to(sum_dtype(q, ring)), part.lse.contiguous()};
    }
    travel.wait();
    block = next;
  }
  whole = with_sinks(whole, sinks);
  whole.out = whole.out.to(q.scalar_type());
  return whole;
}

// Of q and of this rank's rows, by the forward's way back from `last`, where it ended: the own rows
// come last, and while theirs is computed, what others add to it arrives.
template <class Keys> array<Tensor, 2> backward(const Tensor& dout, const Tensor& q,
  const Tensor& own, const Tensor& last, const AttentionPart& whole, const Keys& keys,
  const vector<RingStep>& ring, double scale, const Comm& context) {
  const ScalarType sums = sum_dtype(q, ring);
  Tensor block = last, dq, dblock; // what was added on its way here
  Work travel_back;
  for (size_t i = ring.size(); i-- > 0;) {
    const RingStep& step = ring[i];
    Tensor next = own;
    Work travel;
    if (i > 1) travel = pass_on(context, block, next, -1);
    Tensor dstep, drows;
    if (step.queries.count > 0 || i == 0) {
      const Tensor rows = take(block, step.keys);
      const auto [k, v] = keys.expand(rows);
      const auto [dq_step, dk, dv] =
        attention_part_backward(take(dout, step.queries), take(q, step.queries), k, v,
          {take(whole.out, step.queries), take(whole.lse, step.queries)}, step.span,
          /*causal=*/i == 0, scale);
      dstep = dq_step;
      drows = keys.contract(rows, dk, dv, sums);
    }
    travel_back.wait();
    if (i == 0) {
      dq = dq.defined() ? dq.add_(dstep) : dstep;
      dblock = dblock.defined() ? dblock.add_(drows) : drows;
    } else {
      if (!dq.defined()) dq = at::zeros(q.sizes(), q.options().dtype(sums));
      if (!dblock.defined()) dblock = at::zeros(block.sizes(), dq.options());
      if (dstep.defined()) {
        add_rows(dq, step.queries, dstep);
        add_rows(dblock, step.keys, drows);
      }
      Tensor arriving;
      travel_back = pass_on(context, dblock, arriving, -1);
      dblock = arriving;
    }
    travel.wait();
    block = next;
  }
  return {dq.to(q.scalar_type()), dblock.to(q.scalar_type())};
}

// Attention over what `own` becomes by `keys`; differentiable in q and own's parts, `sources`'
// first.
template <class Keys> Tensor attend(const Tensor& given, const Tensor& own, const Keys& keys,
  const Tensors& sources, const vector<RingStep>& ring, double scale, const Comm& context,
  const Parameter* sinks) {
  const Tensor q = given.contiguous();
  Tensor last = own;
  const AttentionPart whole = forward(q, last, keys, ring, scale, context, sinks);
  const AttentionPart kept{whole.out.detach(), whole.lse};
  Tensors inputs{q};
  inputs.insert(inputs.end(), sources.begin(), sources.end());
  return record(whole.out, inputs, [=, count = inputs.size()](const Tensor& dout) {
    add_sink_gradient(sinks, dout, kept);
    const auto [dq, down] =
      backward(dout.contiguous(), q, own, last, kept, keys, ring, scale, context);
    const auto [first, second] = keys.parts(down);
    Tensors gradients{dq, first, second};
    gradients.resize(count);
    return gradients;
  });
}

// Rows to and from ranks; gradients go the other way.
Tensor exchange(const Tensor& rows, const Halo& halo, const Comm& context) {
  const auto travel = [&context](const Tensor& in, const vector<int64_t>& received,
                        const vector<int64_t>& sent) {
    Tensor out = at::empty({reduce(received.begin(), received.end()), in.size(1)}, in.options());
    context.all_to_all_async(out, in, received, sent).wait();
    return out;
  };
  return record(
    travel(rows.detach(), halo.received, halo.send), {rows}, [travel, &halo](const Tensor& dout) {
    return Tensors{travel(dout.contiguous(), halo.send, halo.received)};
  });
}
}

void merge(const AttentionPart& whole, const RowSet& rows, const AttentionPart& part) {
  Tensor out = take(whole.out, rows), lse = take(whole.lse, rows);
  const Tensor weight = at::sigmoid(part.lse - lse); // rounded once: the sum is formed in FP32
  out.copy_(widen(out).lerp_(widen(part.out), weight));
  put_back(whole.out, rows, out);
  put_back(whole.lse, rows, lse.copy_(at::logaddexp(lse, part.lse)));
}

vector<RingStep> whole_ring(const AttentionSpan& span, int64_t tokens) {
  check_borders(span, tokens, tokens);
  return {{{0, tokens, {}}, {0, tokens, {}}, span}};
}

Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v,
  const vector<RingStep>& ring, double scale, const Comm& context, const Parameter* sinks) {
  check_attention(q, k, v);
  const Tensor own = at::cat({k.detach(), v.detach()}, 2);
  return attend(q, own, PlainKeys{k.size(2)}, {k, v}, ring, scale, context, sinks);
}

array<Tensor, 2> expand_latent(
  const Tensor& latent, const Tensor& rotary_key, Parameter& up, int64_t heads, int64_t v_dim) {
  check_shape(rotary_key, "expand_latent: rotary_key", {latent.size(0), -1});
  PITH_CHECK(up.value.size(0) % heads == 0 && up.value.size(0) / heads > v_dim,
    "{} does not hold keys and values of {} elements for {} heads", describe(up.value, up.name),
    v_dim, heads);
  const Tensor kv = linear(latent, up).view({latent.size(0), heads, up.value.size(0) / heads});
  const int64_t plain = kv.size(2) - v_dim; // Dn
  const Tensor shared = rotary_key.unsqueeze(1).expand({-1, heads, -1});
  return {cat_last(kv.narrow(2, 0, plain), shared), kv.narrow(2, plain, v_dim)};
}

Tensor latent_attention(const Tensor& q, const Tensor& latent, const Tensor& rotary_key,
  Parameter& up, int64_t v_dim, const vector<RingStep>& ring, double scale, const Comm& context) {
  const Tensor own = cat_last(latent.detach(), rotary_key.detach());
  return attend(q, own, LatentRows{&up, q.size(1), v_dim}, {latent, rotary_key, up.value}, ring,
    scale, context, /*sinks=*/nullptr);
}

Tensor window_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Halo& halo,
  double scale, const AttentionOptions& options, const Comm& context) {
  check_attention(q, k, v);
  PITH_CHECK(halo.window == options.window && halo.sent.slot_of.size(0) == q.size(0) &&
      ssize(halo.send) == context.size(),
    "window_attention: {} tokens and a window of {} on {} ranks, but the micro-batch was split "
    "for a window of {} on {} ranks",
    q.size(0), options.window, context.size(), halo.window, halo.send.size());
  const Tensor own = at::cat({k, v}, 2).flatten(1); // (T, Hkv (D + Dv))
  const Tensor all = permute(exchange(permute(own, halo.sent), halo, context), halo.keys)
                       .view({-1, k.size(1), k.size(2) + v.size(2)});
  return attention(
    q, all.narrow(2, 0, k.size(2)), all.narrow(2, k.size(2), v.size(2)), halo.span, scale, options);
}
}
