// Attention of rows split over context-parallel ranks: keys and values go round a ring, or the
// latents of which they are made (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434); in a
// window they come from their holders.
#pragma once
#include "core/comm.h"
#include "operators/attention.h"

namespace pith {
// Ring attention (Liu et al., arXiv 2310.01889) over zigzag chunks. q (T, Hq, D), k (T, Hkv, D), v
// (T, Hkv, Dv): local tokens of a micro-batch split over `context`, `ring` its steps -> (T, Hq,
// Dv), as attention() on the unsplit rows. `sinks` are counted once, after all keys. Merged in FP32
// (FP64 for FP64). Collective: members call it, and the backward pass, in the same order.
Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v,
  const vector<RingStep>& ring, double scale, const Comm& context,
  const Parameter* sinks = nullptr);

// With options.window, no ring: keys and values in the window come from their holders; gradients go
// back and are added in one order. `halo` and `context` must outlive the backward pass.
Tensor window_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Halo& halo,
  double scale, const AttentionOptions& options, const Comm& context);

// Adds in place to these rows, by w = exp(lse): out = (w out + w' out') / (w + w').
void merge(const AttentionPart& whole, const RowSet& rows, const AttentionPart& part);

// The one step of unsplit rows, for a `context` of one process.
vector<RingStep> whole_ring(const AttentionSpan& span, int64_t tokens);

// Keys (T, H, Dn + Dr) and values (T, H, Dv) of latent (T, R), rotary_key (T, Dr) of all heads, up
// (H (Dn + Dv), R): by head rows of the key's first Dn elements, then of the value. Differentiable.
array<Tensor, 2> expand_latent(
  const Tensor& latent, const Tensor& rotary_key, Parameter& up, int64_t heads, int64_t v_dim);

// ring_attention() of q (T, H, Dn + Dr) over these -> (T, H, Dv). Latents and rotary keys travel
// and are saved, with q, result and log-sum-exp; keys and values are made where they are used,
// again in the backward pass, which adds into up.grad in FP32.
Tensor latent_attention(const Tensor& q, const Tensor& latent, const Tensor& rotary_key,
  Parameter& up, int64_t v_dim, const vector<RingStep>& ring, double scale,
  const Comm& context = {});
}
