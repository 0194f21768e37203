#include "operators/latent_attention.h"

#include "operators/attention.h"
#include "operators/function.h"
#include "operators/linear.h"

namespace pith {
namespace {

// at::cat along the last dimension. On CUDA it moves element by element, so in elements of 16 bytes
// where they fit: four times as fast.
Tensor cat_last(const Tensor& a, const Tensor& b) {
  const int64_t each = 16 / a.element_size();
  const auto fits = [&](const Tensor& x) {
    const auto whole = [&](int64_t n) { return n % each == 0; };
    return x.stride(-1) == 1 && whole(x.size(-1)) && whole(x.storage_offset()) &&
           std::ranges::all_of(x.strides().slice(0, static_cast<size_t>(x.dim() - 1)), whole);
  };
  if (!a.is_cuda() || !fits(a) || !fits(b)) return at::cat({a, b}, -1);
  return at::cat({a.view(at::kComplexDouble), b.view(at::kComplexDouble)}, -1)
      .view(a.scalar_type());
}

}  // namespace

LatentKeys expand_latent(
    const Tensor& latent, const Tensor& rotary_key, Parameter& up, int64_t heads, int64_t v_dim) {
  check_shape(rotary_key, "expand_latent: rotary_key", {latent.size(0), -1});
  PITH_CHECK(up.value.size(0) % heads == 0 && up.value.size(0) / heads > v_dim,
      "{} does not hold keys and values of {} elements for {} heads", describe(up.value, up.name),
      v_dim, heads);
  const Tensor kv = linear(latent, up).view({latent.size(0), heads, up.value.size(0) / heads});
  const int64_t plain = kv.size(2) - v_dim;  // Dn
  const Tensor shared = rotary_key.unsqueeze(1).expand({-1, heads, -1});
  return {cat_last(kv.narrow(2, 0, plain), shared), kv.narrow(2, plain, v_dim)};
}

Tensor latent_attention(const Tensor& q, const Tensor& latent, const Tensor& rotary_key,
    Parameter& up, int64_t v_dim, const AttentionSpan& span, double scale) {
  const auto expand = [=, &up, heads = q.size(1)] {
    const at::NoGradGuard no_grad;
    return expand_latent(latent, rotary_key, up, heads, v_dim);
  };
  AttentionPart part;
  {
    const LatentKeys keys = expand();
    check_attention(q, keys.k, keys.v);
    check_borders(span, q.size(0), latent.size(0));
    part = attention_part(q, keys.k, keys.v, span, /*causal=*/true, scale);
  }
  const Tensor out = part.out.to(q.scalar_type());
  const AttentionPart kept{out.detach(), part.lse};
  const bool trained = up.value.requires_grad();
  return record(out, {q, latent, rotary_key, up.value}, [=, &up](const Tensor& dout) {
    const LatentKeys keys = expand();
    const auto [dq, dk, dv] = attention_part_backward(
        dout.contiguous(), q, keys.k, keys.v, kept, span, /*causal=*/true, scale);
    const int64_t shared = rotary_key.size(1), plain = dk.size(2) - shared;
    const auto dtype = q.scalar_type();
    const Tensor dkv = cat_last(dk.narrow(2, 0, plain), dv).flatten(1).to(dtype);
    if (trained) add_or_defer({&up, dkv, latent, {}, {}});
    return Tensors{dq.to(dtype), multiply(dkv, up.value, dtype),
        widen(dk.narrow(2, plain, shared)).sum(1).to(dtype), Tensor()};
  });
}

}  // namespace pith
