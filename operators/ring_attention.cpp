#include "operators/ring_attention.h"

#include <ATen/ops/logaddexp.h>
#include <ATen/ops/sigmoid.h>

#include "operators/function.h"
#include "operators/permute.h"

namespace pith {
namespace {

// A view where the rows are neighbours, else a copy.
Tensor take(const Tensor& x, const RowSet& rows) {
  return rows.index.defined() ? x.index_select(0, rows.index) : x.narrow(0, rows.first, rows.count);
}

// After rows from take(x, rows) were changed in place.
void put_back(Tensor x, const RowSet& rows, const Tensor& taken) {
  if (rows.index.defined()) x.index_copy_(0, rows.index, taken);
}

void add_rows(const Tensor& x, const RowSet& rows, const Tensor& values) {
  Tensor sum = take(x, rows);
  put_back(x, rows, sum.add_(values));
}

// With weights w = exp(lse) of each: out = (w out + w' out') / (w + w').
void merge(const AttentionPart& whole, const RowSet& rows, const AttentionPart& part) {
  Tensor out = take(whole.out, rows), lse = take(whole.lse, rows);
  out.lerp_(part.out.to(out.scalar_type()), at::sigmoid(part.lse - lse));
  put_back(whole.out, rows, out);
  put_back(whole.lse, rows, lse.copy_(at::logaddexp(lse, part.lse)));
}

// Sends a block to the next member while that of the one before arrives in `received`.
Work pass_on(const Comm& context, const Tensor& sent, Tensor& received) {
  received = sent;
  const int64_t size = context.size(), rank = context.rank();
  if (size == 1) return {};
  received = at::empty_like(sent);
  return context.exchange_async(
      {{(rank + 1) % size, sent, true}, {(rank + size - 1) % size, received, false}});
}

// A block (T, Hkv, D + Dv) holds keys of D elements, then values.
std::array<Tensor, 2> keys_values(const Tensor& block, int64_t dim) {
  return {block.narrow(2, 0, dim), block.narrow(2, dim, block.size(2) - dim)};
}

// Out and lse over all keys; `own`: the block of this rank.
AttentionPart forward(const Tensor& q, const Tensor& own, const std::vector<RingStep>& ring,
    double scale, const Comm& context, const Parameter* sinks) {
  const at::NoGradGuard no_grad;
  AttentionPart whole;
  Tensor block = own;
  for (size_t i = 0; i < ring.size(); ++i) {
    const RingStep& step = ring[i];
    Tensor next;
    Work travel;
    if (i + 1 < ring.size()) travel = pass_on(context, block, next);
    const auto [k, v] = keys_values(block, q.size(2));
    if (i == 0) {
      whole = attention_part(q, k, v, step.span, /*causal=*/true, scale);
      whole = {widen(whole.out), whole.lse.contiguous()};
    } else if (step.queries.count > 0) {
      merge(whole, step.queries,
          attention_part(take(q, step.queries), take(k, step.keys), take(v, step.keys), step.span,
              /*causal=*/false, scale));
    }
    travel.wait();
    block = next;
  }
  whole = with_sinks(whole, sinks);
  whole.out = whole.out.to(q.scalar_type());
  return whole;
}

// Gradients of q, k and v. What others add to a block's gradient follows it, one step behind.
Tensors backward(const Tensor& dout, const Tensor& q, const Tensor& own, const AttentionPart& whole,
    const std::vector<RingStep>& ring, double scale, const Comm& context) {
  Tensor block = own, dq, down, dblock;  // down: this rank's share of its own block's gradient
  Work travel_back;
  for (size_t i = 0; i < ring.size(); ++i) {
    const RingStep& step = ring[i];
    Tensor next;
    Work travel;
    if (i + 1 < ring.size()) travel = pass_on(context, block, next);
    std::array<Tensor, 3> grad;
    const auto [k, v] = keys_values(block, q.size(2));
    if (step.queries.count > 0)
      grad = attention_part_backward(take(dout, step.queries), take(q, step.queries),
          take(k, step.keys), take(v, step.keys),
          {take(whole.out, step.queries), take(whole.lse, step.queries)}, step.span,
          /*causal=*/i == 0, scale);
    if (i == 0) {
      dq = widen(grad[0]);
      down = at::cat({widen(grad[1]), widen(grad[2])}, 2);
      dblock = at::zeros_like(down);
    } else {
      travel_back.wait();
      if (step.queries.count > 0) {
        add_rows(dq, step.queries, grad[0]);
        const auto [dk, dv] = keys_values(dblock, q.size(2));
        add_rows(dk, step.keys, grad[1]);
        add_rows(dv, step.keys, grad[2]);
      }
      Tensor arriving;
      travel_back = pass_on(context, dblock, arriving);
      dblock = arriving;
    }
    travel.wait();
    block = next;
  }
  travel_back.wait();
  down.add_(dblock);
  const auto dtype = q.scalar_type();
  const auto [dk, dv] = keys_values(down, q.size(2));
  return {dq.to(dtype), dk.to(dtype), dv.to(dtype)};
}

Tensor take(const Tensor& rows, const Gather& gather) {
  return permute(rows, {.row_of_slot = gather.from,
                           .slot_of = gather.places,
                           .offsets = {},
                           .offsets_host = {},
                           .num_slots = gather.from.size(0)});
}

// Rows to the ranks and from them; their gradients go the other way.
Tensor exchange(const Tensor& rows, const Halo& halo, const Comm& context) {
  const auto travel = [&context](const Tensor& in, const std::vector<int64_t>& received,
                          const std::vector<int64_t>& sent) {
    Tensor out =
        at::empty({std::reduce(received.begin(), received.end()), in.size(1)}, in.options());
    context.all_to_all_async(out, in, received, sent).wait();
    return out;
  };
  return record(
      travel(rows.detach(), halo.received, halo.send), {rows}, [travel, &halo](const Tensor& dout) {
        return Tensors{travel(dout.contiguous(), halo.send, halo.received)};
      });
}

}  // namespace

Tensor ring_attention(const Tensor& given, const Tensor& k, const Tensor& v,
    const std::vector<RingStep>& ring, double scale, const Comm& context, const Parameter* sinks) {
  check_attention(given, k, v);
  const Tensor q = given.contiguous();
  PITH_CHECK(std::ssize(ring) == context.size() && ring[0].queries.count == q.size(0),
      "ring_attention: q has {} tokens on {} ranks, but the micro-batch was split for {} "
      "tokens on {} ranks",
      q.size(0), context.size(), ring.empty() ? 0 : ring[0].queries.count, ring.size());
  const Tensor own = at::cat({k.detach(), v.detach()}, 2);
  const AttentionPart whole = forward(q, own, ring, scale, context, sinks);
  const AttentionPart kept{whole.out.detach(), whole.lse};
  return record(whole.out, {q, k, v}, [=, &ring, &context](const Tensor& dout) {
    add_sink_gradient(sinks, dout, kept);
    return backward(dout.contiguous(), q, own, kept, ring, scale, context);
  });
}

Tensor window_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Halo& halo,
    double scale, const AttentionOptions& options, const Comm& context) {
  check_attention(q, k, v);
  PITH_CHECK(halo.window == options.window && halo.sent.places.size(0) == q.size(0) &&
                 std::ssize(halo.send) == context.size(),
      "window_attention: {} tokens and a window of {} on {} ranks, but the micro-batch was split "
      "for a window of {} on {} ranks",
      q.size(0), options.window, context.size(), halo.window, halo.send.size());
  const Tensor own = at::cat({k, v}, 2).flatten(1);  // (T, Hkv (D + Dv))
  const Tensor all = take(exchange(take(own, halo.sent), halo, context), halo.keys)
                         .view({-1, k.size(1), k.size(2) + v.size(2)});
  return attention(q, all.narrow(2, 0, k.size(2)), all.narrow(2, k.size(2), v.size(2)), halo.span,
      scale, options);
}

}  // namespace pith
