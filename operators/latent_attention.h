// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one short row a token for all heads.
#pragma once
#include "core/microbatch.h"
#include "core/parameter.h"

namespace pith {

struct LatentKeys {
  Tensor k, v;  // (T, H, Dn + Dr), (T, H, Dv)
};

// latent (T, R), rotary_key (T, Dr) shared by all heads, up (H (Dn + Dv), R): for each head the
// rows of its key's first Dn elements, then of its value. Differentiable.
LatentKeys expand_latent(
    const Tensor& latent, const Tensor& rotary_key, Parameter& up, int64_t heads, int64_t v_dim);

// attention() of q (T, H, Dn + Dr) over expand_latent's keys and values -> (T, H, Dv), documents
// with as many keys as queries. Saves q, latent, rotary_key, the result and its log-sum-exp, and
// makes keys and values again in the backward pass. That adds into up.grad in FP32.
Tensor latent_attention(const Tensor& q, const Tensor& latent, const Tensor& rotary_key,
    Parameter& up, int64_t v_dim, const AttentionSpan& span, double scale);

}  // namespace pith
