#include "operators/delta_net.h"

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/stack.h>

#include "operators/function.h"

namespace pith {
namespace {

// --- parts of rows that are split over ranks (zigzag) ---

// own (2 rows, ...) of every rank -> (2 C, rows, ...) in the order of the unsplit rows.
Tensor in_order(const Tensor& own, const Comm& context) {
  const Tensor mine = own.contiguous();
  Tensor all = at::empty({context.size(), mine.numel()}, mine.options());
  context.all_gather_async(all, mine).wait();
  std::vector<int64_t> shape = mine.sizes().vec();
  shape[0] = 2;
  shape.insert(shape.begin(), {context.size(), mine.size(0) / 2});
  all = all.view(shape);
  return at::cat({all.select(2, 0), all.select(2, 1).flip(0)});
}
// This rank's parts of such a tensor, `shift` places further on in their rows; none there: zeros.
Tensor own_parts(const Tensor& all, const Comm& context, int64_t shift = 0) {
  Tensors two;
  for (const int64_t part : {context.rank(), 2 * context.size() - 1 - context.rank()}) {
    const bool there = part + shift >= 0 && part + shift < all.size(0);
    two.push_back(there ? all[part + shift] : at::zeros_like(all[0]));
  }
  return at::stack(two, 1).flatten(0, 1);
}

// --- convolution ---

// Tokens j before each of the parts, whose first K - 1 rows are those before them: weighted, and 0
// where they belong to another document. extended (parts, K - 1 + L, C), weight (C, K)
struct Taps {
  Tensor extended, weight, positions;  // positions (parts, L, 1)
  int64_t count() const { return weight.size(1); }
  Tensor rows(const Tensor& of, int64_t j) const {
    return of.narrow(1, count() - 1 - j, positions.size(1));
  }
  Tensor column(int64_t j) const { return weight.select(1, count() - 1 - j); }
  Tensor inside(int64_t j) const { return positions.ge(j); }
  Tensor sum() const {
    Tensor total = rows(extended, 0) * column(0);
    for (int64_t j = 1; j < count(); ++j)
      total.add_((rows(extended, j) * column(j)).mul_(inside(j)));
    return total;
  }
};

// --- the delta rule ---

// (T, heads, D) as (N, B, chunk, D): N chunks of each part, padded with zeros, B = parts * heads.
struct Cut {
  int64_t parts, length, chunk, count;

  Tensor split(const Tensor& x, int64_t repeat = 1) const {
    const int64_t heads = x.size(1), dim = x.size(2);
    Tensor y = widen(x).reshape({parts, length, heads, dim});
    if (count * chunk > length) y = at::constant_pad_nd(y, {0, 0, 0, 0, 0, count * chunk - length});
    y = y.view({parts, count, chunk, heads, dim}).permute({1, 0, 3, 2, 4}).unsqueeze(3);
    return y.expand({-1, -1, -1, repeat, -1, -1})
        .reshape({count, parts * heads * repeat, chunk, dim});
  }
  // The inverse: repeated heads are summed.
  Tensor join(const Tensor& x, int64_t heads, int64_t repeat = 1) const {
    const int64_t dim = x.size(3);
    const Tensor y = x.view({count, parts, heads, repeat, chunk, dim}).sum(3);
    return y.permute({1, 0, 3, 2, 4})
        .reshape({parts, count * chunk, heads, dim})
        .narrow(1, 0, length)
        .reshape({parts * length, heads, dim});
  }
};

// Sizes of x's vectors, inverted (T, heads, 1), in wide.
Tensor inverse_norm(const Tensor& x) { return x.square().sum(-1, true).add_(1e-6).rsqrt_(); }

// Everything of a chunk that no state is needed for, (N, B, ...). With c the running sum of g, d
// the decays exp(c_i - c_j) between tokens of one document (j <= i), else 0:
struct Chunks {
  Tensor q, k, v, beta;  // q, k normalised; (.., C, 1)
  Tensor g;              // (T, Hv)
  Tensor decay;          // d (.., C, C)
  Tensor from_start;     // (.., C, 1) decay of what comes from before the chunk
  Tensor to_end;         // (.., C, 1) decay until its end
  Tensor keys, scores;   // k k^T d below the diagonal; q k^T d
  Tensor system;         // beta keys: (1 + system) [u w] = beta [v from_start k]
  Tensor u, w, written;  // a state S becomes u - w S, the values to write; written: to_end k
  Tensor step, add;      // and after the chunk step S + add
};

struct Rule {
  Tensor q, k, v, a, b, a_log, dt_bias;
  Tensor positions;
  Cut cut;
  Comm context;
  double scale;
  int64_t repeat() const { return v.size(1) / k.size(1); }

  Chunks chunks() const {
    Chunks c;
    const Tensor wide_q = widen(q), wide_k = widen(k);
    c.q = cut.split(wide_q * inverse_norm(wide_q) * scale, repeat());
    c.k = cut.split(wide_k * inverse_norm(wide_k), repeat());
    c.v = cut.split(v);
    c.beta = cut.split(at::sigmoid(widen(b)).unsqueeze(2));
    c.g = at::softplus(widen(a) + widen(dt_bias)).mul_(widen(a_log).exp().neg_());
    // Sums in FP64: differences of large ones matter.
    const Tensor sum = cut.split(c.g.to(at::kDouble).unsqueeze(2)).cumsum(2);
    const Tensor begins = positions.eq(0).to(at::kFloat).view({-1, 1, 1});
    const Tensor document = cut.split(begins, v.size(1)).cumsum(2);  // within the chunk
    const auto last = [&](const Tensor& x) { return x.narrow(2, cut.chunk - 1, 1); };
    const auto wide = [&](const Tensor& x) { return x.to(c.v.scalar_type()); };
    const Tensor same = document.eq(document.transpose(2, 3)).tril();
    c.decay = wide(sum - sum.transpose(2, 3))
                  .masked_fill_(same.logical_not(), -std::numeric_limits<double>::infinity())
                  .exp_();
    c.from_start = wide(sum.exp()).mul_(document.eq(0));
    c.to_end = wide((last(sum) - sum).exp_()).mul_(document.eq(last(document)));
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
    c.step.diagonal(0, 2, 3).add_(last(c.from_start).squeeze(3));
    c.add = at::matmul(c.written.transpose(2, 3), c.u);
    return c;
  }
};

// States (N + 1, B, ..): x[0] = start, x[i + 1] = step[i] x[i] + add[i]; in reverse x[N] = start,
// x[i] = step[i]^T x[i + 1] + add[i].
Tensor scan(const Tensor& step, const Tensor& add, const Tensor& start, bool reverse = false) {
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

// Where rows are split: what this rank's scans start with. `local`: the end of its scans over
// (step, add) from zero. Every part's whole transition and end travel; all ranks scan over them.
Tensor start_of_parts(const Tensor& step, const Tensor& local, const Rule& rule, bool reverse) {
  const int64_t parts = rule.cut.parts, keys = local.size(1);
  Tensor whole = at::zeros({local.size(0), keys, keys}, local.options());
  whole.diagonal(0, 1, 2).fill_(1);
  for (int64_t n = 0; n < step.size(0); ++n) whole = at::matmul(step[n], whole);
  const auto of_parts = [&](const Tensor& x) { return x.view({parts, -1, keys, x.size(2)}); };
  const Tensor all = in_order(at::cat({of_parts(whole), of_parts(local)}, 3), rule.context)
                         .flatten(1, 2);  // (2 C, rows * heads, ..)
  const Tensor add = all.narrow(3, keys, local.size(2));
  const Tensor ends = scan(all.narrow(3, 0, keys), add, at::zeros_like(add[0]), reverse);
  return own_parts(
      ends.narrow(0, reverse ? 1 : 0, all.size(0)).unflatten(1, {parts / 2, -1}), rule.context)
      .flatten(0, 1);
}

Tensor zeros_of(const Chunks& c) {
  return at::zeros({c.k.size(1), c.k.size(3), c.v.size(3)}, c.v.options());
}

// The states before every chunk and after the last, (N + 1, B, Dk, Dv).
Tensor states_of(const Chunks& c, const Rule& rule, const Tensor& state) {
  Tensor start = zeros_of(c);
  if (state.defined()) start = widen(state).view(start.sizes());
  if (rule.context.size() > 1)
    start = start_of_parts(c.step, scan(c.step, c.add, start)[c.add.size(0)], rule, false);
  return scan(c.step, c.add, start);
}

// Gradients of q, k, v, a, b, a_log; a's and b's in FP32.
Tensors backward(const Rule& rule, const Tensor& dout) {
  const Chunks c = rule.chunks();
  const int64_t n = rule.cut.count, repeat = rule.repeat(), dv_size = rule.v.size(2);
  const auto t = [](const Tensor& x) { return x.transpose(2, 3); };
  const auto row_sum = [](const Tensor& x) { return x.sum(3, true); };
  const Tensor before = states_of(c, rule, {}).narrow(0, 0, n), d = rule.cut.split(dout);
  const Tensor values = c.u - at::matmul(c.w, before);  // that are written
  Tensor du = at::matmul(t(c.scores), d);
  // Gradients of the states: `after` each chunk, from what all later ones read of them.
  const Tensor read = at::matmul(t(c.q * c.from_start), d).sub_(at::matmul(t(c.w), du));
  Tensor start = zeros_of(c);
  if (rule.context.size() > 1)
    start = start_of_parts(c.step, scan(c.step, read, start, true)[0], rule, true);
  const Tensor after = scan(c.step, read, start, true).narrow(0, 1, n);
  du.add_(at::matmul(c.written, after));
  const Tensor dwritten = at::matmul(values, t(after));
  const Tensor dw = at::matmul(du, t(before)).neg_();

  // Through the triangular system; dsystem = -x [u w]^T.
  const Tensor x = at::linalg_solve_triangular(
      t(c.system), at::cat({du, dw}, 3), /*upper=*/true, /*left=*/true, /*unitriangular=*/true);
  const Tensor dsystem = at::matmul(x, t(at::cat({c.u, c.w}, 3))).neg_().tril_(-1);
  const Tensor dscores = at::matmul(d, t(values));
  const Tensor dq_state = at::matmul(d, t(before));
  const Tensor dbeta =
      row_sum(dsystem * c.keys).add_(row_sum(x * at::cat({c.v, c.k * c.from_start}, 3)));
  const Tensor scaled = x * c.beta, dk_start = scaled.narrow(3, dv_size, c.k.size(3));
  const Tensor dkk = (dsystem * c.beta).mul_(c.decay), dqk = dscores * c.decay;
  const Tensor dq = at::matmul(dqk, c.k).addcmul_(dq_state, c.from_start);
  Tensor dk = at::matmul(t(dqk), c.q).add_(at::matmul(dkk + t(dkk), c.k));
  dk.addcmul_(dk_start, c.from_start).addcmul_(dwritten, c.to_end);

  // Of the decays' logarithms, then of g, whose running sums they are differences of.
  const Tensor pairs = (dsystem * c.system).add_(dscores * c.scores);
  const Tensor ends = row_sum(dwritten * c.k).mul_(c.to_end);
  const Tensor starts = row_sum(dq_state * c.q).add_(row_sum(dk_start * c.k)).mul_(c.from_start);
  Tensor dsum = row_sum(pairs).sub_(t(pairs.sum(2, true))).add_(starts).sub_(ends);
  const auto last = [&](const Tensor& of) { return of.narrow(2, rule.cut.chunk - 1, 1); };
  last(dsum)
      .add_(ends.sum(2, true))
      .add_((after * before).sum({2, 3}, true).mul_(last(c.from_start)));
  const Tensor dg_chunks = dsum.flip(2).cumsum(2).flip(2);

  const int64_t heads = rule.v.size(1), key_heads = rule.k.size(1);
  const auto of_normalised = [&](const Tensor& raw, const Tensor& dy, double factor) {
    const Tensor wide = widen(raw), inverse = inverse_norm(wide), y = wide * inverse;
    const Tensor g = rule.cut.join(dy, key_heads, repeat) * factor;
    return (g - y * (g * y).sum(-1, true)).mul_(inverse).to(raw.scalar_type());
  };
  const Tensor dg = rule.cut.join(dg_chunks, heads).squeeze(2);  // (T, Hv)
  const Tensor beta = at::sigmoid(widen(rule.b));
  const Tensor da = at::sigmoid(widen(rule.a) + widen(rule.dt_bias))
                        .mul_(widen(rule.a_log).exp().neg_())
                        .mul_(dg);
  return {of_normalised(rule.q, dq, rule.scale), of_normalised(rule.k, dk, 1),
      rule.cut.join(scaled.narrow(3, 0, dv_size), heads).to(rule.v.scalar_type()), da,
      rule.cut.join(dbeta, heads).squeeze(2) * beta * (1 - beta), (dg * c.g).sum(0)};
}

}  // namespace

TokenParts token_parts(
    const Tensor& positions, const Tensor& cu_seqlens_host, int64_t rows, const Comm& context) {
  const int32_t* border = cu_seqlens_host.const_data_ptr<int32_t>();
  const int64_t borders = cu_seqlens_host.numel();
  const int64_t length = positions.size(0) * context.size() / std::max<int64_t>(rows, 1);
  int64_t found = 0;  // of the ends of rows, if all are so long
  for (int64_t i = 0; i < borders; ++i) found += border[i] == length * (found + 1) ? 1 : 0;
  const bool equal = rows > 0 && found == rows && border[borders - 1] == length * rows;
  if (context.size() == 1) return {positions, equal ? rows : 1, context};
  PITH_CHECK(equal,
      "a delta net over {} context-parallel ranks needs rows of one length; {} rows "
      "hold {} tokens here",
      context.size(), rows, positions.size(0));
  return {positions, 2 * rows, context};
}

Tensor causal_convolution(
    const Tensor& x, Parameter& weight, const TokenParts& parts, const Tensor& state) {
  check_shape(weight.value, weight.name, {x.size(1), 1, -1});
  check_tensor(parts.positions, "convolution: positions", at::kInt, {x.size(0)});
  const int64_t length = div_exact(x.size(0), parts.count), kept = weight.value.size(2) - 1;
  const bool split = parts.context.size() > 1;
  PITH_CHECK(!split || length >= kept,
      "{}: context parallelism cuts rows into parts of {} tokens; the convolution needs {}",
      weight.name, length, kept);
  const auto taps = [=, value = weight.value.detach()] {
    const Tensor own = widen(x.detach()).reshape({parts.count, length, x.size(1)});
    Tensor before = at::zeros({parts.count, kept, x.size(1)}, own.options());
    if (state.defined()) before = widen(state);
    if (split)
      before =
          own_parts(in_order(own.narrow(1, length - kept, kept), parts.context), parts.context, -1);
    return Taps{at::cat({before, own}, 1), widen(value.flatten(1)),
        parts.positions.view({parts.count, length, 1})};
  };
  Tensor y;
  {
    const at::NoGradGuard no_grad;
    const Taps all = taps();
    const Tensor sum = all.sum();
    y = at::sigmoid(sum).mul_(sum).to(x.scalar_type()).view(x.sizes());
    if (state.defined()) Tensor(state).copy_(all.extended.narrow(1, length, kept));
  }
  return record(y, {x, weight.value}, [=, &weight](const Tensor& dy) {
    const Taps all = taps();
    const Tensor sum = all.sum(), s = at::sigmoid(sum);
    const Tensor d = (widen(dy).view(sum.sizes()) * s).mul_(sum.mul_(1 - s).add_(1));
    const Tensor dextended = at::zeros_like(all.extended);
    for (int64_t j = 0; j <= kept; ++j) {
      const Tensor seen = d * all.inside(j);
      all.rows(dextended, j).addcmul_(seen, all.column(j));
      if (weight.value.requires_grad())
        weight.grad.select(2, kept - j)
            .add_((seen * all.rows(all.extended, j)).flatten(0, 1).sum(0).unsqueeze(1));
    }
    Tensor dx = dextended.narrow(1, kept, length);
    if (split)  // what later parts read of these
      dx.narrow(1, length - kept, kept)
          .add_(own_parts(in_order(dextended.narrow(1, 0, kept), parts.context), parts.context, 1));
    return Tensors{dx.reshape(x.sizes()).to(x.scalar_type()), Tensor()};
  });
}

Tensor gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const DeltaGates& gates,
    const TokenParts& parts, const Tensor& state, int64_t chunk) {
  const int64_t tokens = v.size(0), heads = v.size(1);
  check_shape(q, "delta rule: q", {tokens, k.size(1), k.size(2)});
  check_shape(k, "delta rule: k", {tokens, -1, -1});
  check_shape(gates.a, "delta rule: a", {tokens, heads});
  check_shape(gates.b, "delta rule: b", {tokens, heads});
  check_shape(gates.a_log.value, gates.a_log.name, {heads});
  check_shape(gates.dt_bias.value, gates.dt_bias.name, {heads});
  check_tensor(parts.positions, "delta rule: positions", at::kInt, {tokens});
  PITH_CHECK(
      heads % k.size(1) == 0, "delta rule: {} value heads and {} key heads", heads, k.size(1));
  const int64_t length = div_exact(tokens, parts.count);
  const int64_t size = std::clamp<int64_t>(length, 1, chunk);
  const Rule rule{q.detach(), k.detach(), v.detach(), gates.a.detach(), gates.b.detach(),
      gates.a_log.value.detach(), gates.dt_bias.value.detach(), parts.positions,
      {parts.count, length, size, (length + size - 1) / size}, parts.context,
      1 / std::sqrt(static_cast<double>(q.size(2)))};
  Tensor out;
  {
    const at::NoGradGuard no_grad;
    const Chunks c = rule.chunks();
    const Tensor states = states_of(c, rule, state), before = states.narrow(0, 0, rule.cut.count);
    const Tensor values = c.u - at::matmul(c.w, before);
    const Tensor y = at::matmul(c.q * c.from_start, before).add_(at::matmul(c.scores, values));
    out = rule.cut.join(y, heads).to(v.scalar_type());
    if (state.defined()) Tensor(state).copy_(states[rule.cut.count].view(state.sizes()));
  }
  Parameter &a_log = gates.a_log, &dt_bias = gates.dt_bias;
  const Tensors inputs{q, k, v, gates.a, gates.b, a_log.value, dt_bias.value};
  return record(out, inputs, [rule, &a_log, &dt_bias](const Tensor& dout) {
    Tensors d = backward(rule, dout);
    if (a_log.value.requires_grad()) a_log.grad.add_(d[5]);
    if (dt_bias.value.requires_grad()) dt_bias.grad.add_(d[3].sum(0));
    return Tensors{d[0], d[1], d[2], d[3].to(rule.a.scalar_type()), d[4].to(rule.b.scalar_type()),
        Tensor(), Tensor()};
  });
}

Tensor gated(const Tensor& x, const Tensor& gate, bool silu) {
  const auto value = [silu](const Tensor& z, const Tensor& s) { return silu ? z * s : s; };
  Tensor y;
  {
    const at::NoGradGuard no_grad;
    const Tensor z = widen(gate);
    y = (widen(x) * value(z, at::sigmoid(z))).to(x.scalar_type());
  }
  return record(y, {x, gate}, [=, x = x.detach(), gate = gate.detach()](const Tensor& dy) {
    const Tensor z = widen(gate), s = at::sigmoid(z), wide = widen(dy);
    const Tensor slope = silu ? s * (z * (1 - s) + 1) : s * (1 - s);
    return Tensors{(wide * value(z, s)).to(x.scalar_type()),
        (wide * widen(x)).sum_to_size(z.sizes()).mul_(slope).to(gate.scalar_type())};
  });
}

}  // namespace pith
