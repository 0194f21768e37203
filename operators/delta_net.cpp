#include "operators/delta_net.h"
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/softplus.h>
#include "operators/function.h"

namespace pith {
namespace {
// Zigzag parts, own (2 rows, ..) of every rank -> (2 C, rows, ..) in unsplit order.
Tensor in_order(const Tensor& own, const Comm& context) {
  Tensor all = at::empty({context.size(), own.numel()}, own.options());
  context.all_gather_async(all, own.contiguous()).wait();
  vector<int64_t> shape = own.sizes().vec();
  shape[0] = 2;
  shape.insert(shape.begin(), {context.size(), own.size(0) / 2});
  all = all.view(shape);
  return at::cat({all.select(2, 0), all.select(2, 1).flip(0)});
}
// This rank's parts of it, or those `shift` places on; none there: zeros.
Tensor own_parts(const Tensor& all, const Comm& context, int64_t shift = 0) {
  Tensors two;
  for (const int64_t part: {context.rank(), 2 * context.size() - 1 - context.rank()}) {
    const bool there = part + shift >= 0 && part + shift < all.size(0);
    two.push_back(there ? all[part + shift] : at::zeros_like(all[0]));
  }
  return at::stack(two, 1).flatten(0, 1);
}

// (T, heads, D) as (N, B, chunk, D): N chunks a part, padded with zeros, B = parts * heads.
struct Cut {
  int64_t parts, length, chunk, count;

  Tensor split(const Tensor& x) const {
    const int64_t heads = x.size(1), dim = x.size(2);
    return at::constant_pad_nd(
      widen(x).reshape({parts, length, heads, dim}), {0, 0, 0, 0, 0, count * chunk - length})
      .view({parts, count, chunk, heads, dim})
      .permute({1, 0, 3, 2, 4})
      .reshape({count, parts * heads, chunk, dim});
  }
  Tensor join(const Tensor& x) const { // the inverse
    return x.view({count, parts, x.size(1) / parts, chunk, x.size(3)})
      .permute({1, 0, 3, 2, 4})
      .flatten(1, 2)
      .narrow(1, 0, length)
      .flatten(0, 1);
  }
  Tensor last(const Tensor& x) const { return x.narrow(2, chunk - 1, 1); }
};

Tensor inverse_norm(const Tensor& x) { return x.square().sum(-1, true).add_(1e-6).rsqrt_(); }

// What of a chunk needs no state, (N, B, C, ..).
struct Chunks {
  Tensor g; // (T, Hv)
  Tensor q, k, v, beta; // q and k normalised
  Tensor decay; // (C, C) to later tokens of the document, else 0
  Tensor from_start, to_end; // (C, 1) decay since the chunk before, until its end
  Tensor keys, scores; // k k^T decay below the diagonal; q k^T decay
  Tensor system; // beta keys: (1 + system) [u w] = beta [v, from_start k]
  Tensor u, w, written; // with the state S before it a chunk writes u - w S at k to_end
  Tensor step, add; // and makes S into step S + add
};

struct Rule {
  Tensor q, k, v, a, b, a_log, dt_bias, positions;
  Cut cut;
  Comm context;
  double scale() const { return 1 / sqrt(real(q.size(2))); }

  Chunks chunks() const {
    Chunks c;
    const auto normal = [&](const Tensor& raw) { // for each value head
      const Tensor wide = widen(raw);
      return cut.split((wide * inverse_norm(wide)).repeat_interleave(v.size(1) / k.size(1), 1));
    };
    c.q = normal(q).mul_(scale());
    c.k = normal(k);
    c.v = cut.split(v);
    c.beta = cut.split(at::sigmoid(widen(b)).unsqueeze(2));
    c.g = at::softplus(widen(a) + widen(dt_bias)).mul_(widen(a_log).exp().neg_());
    // In FP64: small differences of large sums count.
    const Tensor sum = cut.split(c.g.to(kDouble).unsqueeze(2)).cumsum(2);
    const Tensor begins = positions.eq(0).to(kFloat).view({-1, 1, 1});
    const Tensor document = cut.split(begins.expand({-1, v.size(1), 1})).cumsum(2); // of the chunk
    const auto wide = [&](const Tensor& x) { return x.to(c.v.scalar_type()); };
    c.decay = wide(sum - sum.transpose(2, 3))
                .masked_fill_(document.ne(document.transpose(2, 3)), -INFINITY)
                .exp_()
                .tril_();
    c.from_start = wide(sum.exp()).mul_(document.eq(0));
    c.to_end = wide((cut.last(sum) - sum).exp_()).mul_(document.eq(cut.last(document)));
    c.keys = at::matmul(c.k, c.k.transpose(2, 3)).mul_(c.decay).tril_(-1);
    c.scores = at::matmul(c.q, c.k.transpose(2, 3)).mul_(c.decay);
    c.system = c.keys * c.beta;
    const Tensor uw = at::linalg_solve_triangular(c.system,
      at::cat({c.v, c.k * c.from_start}, 3).mul_(c.beta), /*upper=*/false, /*left=*/true,
      /*unitriangular=*/true);
    c.u = uw.narrow(3, 0, c.v.size(3));
    c.w = uw.narrow(3, c.v.size(3), c.k.size(3));
    c.written = c.k * c.to_end;
    c.step = at::matmul(c.written.transpose(2, 3), c.w).neg_();
    c.step.diagonal(0, 2, 3).add_(cut.last(c.from_start).squeeze(3));
    c.add = at::matmul(c.written.transpose(2, 3), c.u);
    return c;
  }
};

// (N + 1, ..): x[0] = start, x[i + 1] = step[i] x[i] + add[i]; in reverse x[N] = start, x[i] =
// step[i]^T x[i + 1] + add[i]. step (N, B, Dk, Dk), add (N, B, Dk, n), start (B, Dk, n)
Tensor scan(const Tensor& step, const Tensor& add, const Tensor& start, bool reverse) {
  const int64_t count = step.size(0);
  Tensor x = at::empty({count + 1, start.size(0), start.size(1), start.size(2)}, start.options());
  x[reverse ? count : 0].copy_(start);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = reverse ? count - 1 - n : n;
    Tensor to = x[reverse ? i : i + 1];
    at::baddbmm_out(
      to, add[i], reverse ? step[i].transpose(1, 2) : step[i], x[reverse ? i + 1 : i]);
  }
  return x;
}

// Over a rank's chunks. Where rows are split, it starts with what the parts before (in reverse:
// behind) leave: all ranks' transitions and ends from zero are gathered and scanned.
Tensor scan_parts(
  const Rule& rule, const Tensor& step, const Tensor& add, Tensor start, bool reverse = false) {
  if (!start.defined()) start = at::zeros_like(add.sum(0));
  if (rule.context.size() == 1) return scan(step, add, start, reverse);
  const int64_t keys = start.size(1);
  const Tensor ones = at::eye(keys, start.options()).expand({start.size(0), keys, keys});
  const Tensor whole = scan(step, at::zeros_like(step), ones, false)[step.size(0)];
  const Tensor end = scan(step, add, start, reverse)[reverse ? 0 : step.size(0)];
  const Tensor own = at::cat({whole, end}, 2).unflatten(0, {rule.cut.parts, -1});
  const Tensor all = in_order(own, rule.context).flatten(1, 2); // (2 C, rows * heads, ..)
  const Tensor ends = all.narrow(3, keys, end.size(2));
  const Tensor states = scan(all.narrow(3, 0, keys), ends, at::zeros_like(ends[0]), reverse)
                          .narrow(0, reverse ? 1 : 0, all.size(0))
                          .unflatten(1, {rule.cut.parts / 2, -1});
  return scan(step, add, own_parts(states, rule.context).flatten(0, 1), reverse);
}

// Of q, k, v, a, b, a_log, the last three in FP32.
Tensors backward(const Rule& rule, const Tensor& dout) {
  const Chunks c = rule.chunks();
  const Cut& cut = rule.cut;
  const int64_t n = cut.count, value_dim = rule.v.size(2);
  const auto t = [](const Tensor& x) { return x.transpose(2, 3); };
  const auto row_sum = [](const Tensor& x) { return x.sum(3, true); };
  const Tensor before = scan_parts(rule, c.step, c.add, {}).narrow(0, 0, n); // states
  const Tensor values = c.u - at::matmul(c.w, before), d = cut.split(dout);
  Tensor du = at::matmul(t(c.scores), d);
  const Tensor read = at::matmul(t(c.q * c.from_start), d).sub_(at::matmul(t(c.w), du));
  const Tensor after = scan_parts(rule, c.step, read, {}, true).narrow(0, 1, n); // states' d
  du.add_(at::matmul(c.written, after));
  const Tensor dw = at::matmul(du, t(before)).neg_(), dwritten = at::matmul(values, t(after));

  // Through the triangular system: of its right side x, of itself -x [u w]^T.
  const Tensor x = at::linalg_solve_triangular(
    t(c.system), at::cat({du, dw}, 3), /*upper=*/true, /*left=*/true, /*unitriangular=*/true);
  const Tensor dsystem = at::matmul(x, t(at::cat({c.u, c.w}, 3))).neg_().tril_(-1);
  const Tensor dbeta =
    row_sum(dsystem * c.keys).add_(row_sum(at::cat({c.v, c.k * c.from_start}, 3).mul_(x)));
  const Tensor dright = x * c.beta, dk_start = dright.narrow(3, value_dim, c.k.size(3));
  const Tensor dscores = at::matmul(d, t(values)), dq_start = at::matmul(d, t(before));
  const Tensor dkk = (dsystem * c.beta).mul_(c.decay), dqk = dscores * c.decay;
  const Tensor dq = at::matmul(dqk, c.k).addcmul_(dq_start, c.from_start);
  const Tensor dk = at::matmul(t(dqk), c.q).add_(at::matmul(dkk + t(dkk), c.k));
  dk.addcmul_(dk_start, c.from_start).addcmul_(dwritten, c.to_end);

  // Of the decays' logarithms, then of g, of whose running sums they are differences. What cancels
  // (a token's decay to itself) is left out, the rest summed in FP64: strong decays leave little.
  const auto sum = [](const Tensor& of, int64_t dim) { return of.sum(dim, true, kDouble); };
  const Tensor pairs = (dsystem * c.system).add_(dscores * c.scores).tril_(-1);
  const Tensor ends = sum(dwritten * c.k * c.to_end, 3);
  const Tensor dsum = sum(pairs, 3).sub_(t(sum(pairs, 2))).sub_(ends);
  dsum.add_(sum((dq_start * c.q).add_(dk_start * c.k).mul_(c.from_start), 3));
  cut.last(dsum)
    .add_(sum(ends, 2))
    .add_((after * before).sum(3, true).sum(2, true).mul_(cut.last(c.from_start)));
  const auto of_tokens = [&](const Tensor& of) { // (T, Hv)
    return cut.join(of).squeeze(2).to(c.g.scalar_type());
  };
  const Tensor dg = of_tokens(dsum.flip(2).cumsum(2).flip(2)), beta = at::sigmoid(widen(rule.b));
  const Tensor slope = at::sigmoid(widen(rule.a) + widen(rule.dt_bias));
  const auto of_normalised = [&](const Tensor& raw, const Tensor& dy) {
    const Tensor wide = widen(raw), inverse = inverse_norm(wide), y = wide * inverse;
    const Tensor sums = cut.join(dy).unflatten(1, {raw.size(1), -1}).sum(2); // of value heads
    return (sums - y * (sums * y).sum(-1, true)).mul_(inverse).to(raw.scalar_type());
  };
  return {of_normalised(rule.q, dq * rule.scale()), of_normalised(rule.k, dk),
    cut.join(dright.narrow(3, 0, value_dim).contiguous()).to(rule.v.scalar_type()),
    dg * slope * widen(rule.a_log).exp().neg_(), of_tokens(dbeta) * beta * (1 - beta),
    (dg * c.g).sum(0)};
}
}

TokenParts token_parts(
  const Tensor& positions, const Tensor& cu_seqlens_host, int64_t rows, const Comm& context) {
  const int64_t tokens = positions.size(0) * context.size(), borders = cu_seqlens_host.numel();
  const int32_t* border = cu_seqlens_host.const_data_ptr<int32_t>();
  int64_t found = 0; // ends of rows if equally long
  for (int64_t i = 0; i < borders && rows > 0; ++i)
    if (border[i] == tokens / rows * (found + 1)) ++found;
  const bool equal = rows > 0 && tokens % rows == 0 && found == rows;
  if (context.size() == 1) return {positions, equal ? rows : 1, context};
  PITH_CHECK(equal,
    "a delta net over {} context-parallel ranks needs rows of one length; {} rows hold {} tokens",
    context.size(), rows, tokens);
  return {positions, 2 * rows, context};
}

Tensor causal_convolution(
  const Tensor& x, Parameter& weight, const TokenParts& parts, const Tensor& state) {
  check_shape(weight.value, weight.name, {x.size(1), 1, -1});
  check_tensor(parts.positions, "convolution: positions", kInt, {x.size(0)});
  const int64_t length = div_exact(x.size(0), parts.count), kept = weight.value.size(2) - 1;
  const bool split = parts.context.size() > 1;
  PITH_CHECK(!split || length >= kept,
    "{}: context parallelism cuts rows into parts of {} tokens; the convolution needs {}",
    weight.name, length, kept);
  // Parts behind the tokens before them, (parts, K - 1 + L, C).
  const auto extend = [=] {
    const Tensor own = widen(x).reshape({parts.count, length, x.size(1)});
    Tensor before = at::zeros({parts.count, kept, x.size(1)}, own.options());
    if (state.defined()) before = widen(state);
    if (split)
      before =
        own_parts(in_order(own.narrow(1, length - kept, kept), parts.context), parts.context, -1);
    return at::cat({before, own}, 1);
  };
  // The tokens j before, their weights, and whether the document is the same.
  const auto rows = [=](const Tensor& of, int64_t j) { return of.narrow(1, kept - j, length); };
  const auto column = [=, &weight](int64_t j) {
    return widen(weight.value.detach()).select(2, kept - j).squeeze(1);
  };
  const auto inside = [=](
                        int64_t j) { return parts.positions.view({parts.count, length, 1}).ge(j); };
  const auto convolve = [=](const Tensor& extended) {
    Tensor sum = rows(extended, 0) * column(0);
    for (int64_t j = 1; j <= kept; ++j) sum.add_((rows(extended, j) * column(j)).mul_(inside(j)));
    return sum;
  };
  Tensor y;
  {
    const NoGradGuard no_grad;
    const Tensor extended = extend(), sum = convolve(extended);
    y = at::sigmoid(sum).mul_(sum).to(x.scalar_type()).view(x.sizes());
    if (state.defined()) Tensor(state).copy_(extended.narrow(1, length, kept));
  }
  return record(y, {x, weight.value}, [=, &weight](const Tensor& dy) {
    const Tensor extended = extend(), sum = convolve(extended), s = at::sigmoid(sum);
    const Tensor d = (widen(dy).reshape(sum.sizes()) * s).mul_(sum.mul_(1 - s).add_(1));
    const Tensor dextended = at::zeros_like(extended);
    for (int64_t j = 0; j <= kept; ++j) {
      const Tensor seen = d * inside(j);
      rows(dextended, j).addcmul_(seen, column(j));
      if (weight.value.requires_grad())
        weight.grad.select(2, kept - j)
          .add_((seen * rows(extended, j)).flatten(0, 1).sum(0).unsqueeze(1));
    }
    const Tensor dx = dextended.narrow(1, kept, length);
    if (split) // what later parts read
      dx.narrow(1, length - kept, kept)
        .add_(own_parts(in_order(dextended.narrow(1, 0, kept), parts.context), parts.context, 1));
    return Tensors{dx.reshape(x.sizes()).to(x.scalar_type()), Tensor()};
  });
}

Tensor gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const DeltaGates& gates,
  const TokenParts& parts, const Tensor& state, int64_t chunk) {
  Parameter &a_log = gates.a_log, &dt_bias = gates.dt_bias;
  const int64_t tokens = v.size(0), heads = v.size(1);
  check_shape(k, "delta rule: k", {tokens, -1, -1});
  check_shape(q, "delta rule: q", {tokens, k.size(1), k.size(2)});
  check_tensor(parts.positions, "delta rule: positions", kInt, {tokens});
  for (const Tensor& gate: {gates.a, gates.b})
    check_shape(gate, "delta rule: gate", {tokens, heads});
  for (Parameter* parameter: {&a_log, &dt_bias})
    check_shape(parameter->value, parameter->name, {heads});
  div_exact(heads, k.size(1));
  const int64_t length = div_exact(tokens, parts.count);
  const int64_t size = std::clamp<int64_t>(length, 1, chunk), count = (length + size - 1) / size;
  const Rule rule{q, k, v, gates.a, gates.b, a_log.value, dt_bias.value, parts.positions,
    {parts.count, length, size, count}, parts.context};
  Tensor out;
  {
    const NoGradGuard no_grad;
    const Chunks c = rule.chunks();
    const Tensor start = state.defined() ? widen(state).flatten(0, 1) : Tensor();
    const Tensor states = scan_parts(rule, c.step, c.add, start),
                 before = states.narrow(0, 0, count);
    const Tensor values = c.u - at::matmul(c.w, before);
    const Tensor y = at::matmul(c.q * c.from_start, before).add_(at::matmul(c.scores, values));
    out = rule.cut.join(y).to(v.scalar_type());
    if (state.defined()) Tensor(state).copy_(states[count].view(state.sizes()));
  }
  return record(out, {q, k, v, gates.a, gates.b, a_log.value, dt_bias.value},
    [rule, &a_log, &dt_bias](const Tensor& dout) {
    const Tensors d = backward(rule, dout);
    if (a_log.value.requires_grad()) a_log.grad.add_(d[5]);
    if (dt_bias.value.requires_grad()) dt_bias.grad.add_(d[3].sum(0));
    return Tensors{d[0], d[1], d[2], d[3].to(rule.a.scalar_type()), d[4].to(rule.b.scalar_type()),
      Tensor(), Tensor()};
  });
}
}
