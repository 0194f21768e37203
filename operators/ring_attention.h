// Attention of rows that are split over context-parallel ranks: keys and values go round a ring, or
// the latents of which they are made (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434);
// in a window they come from those who hold them.
#pragma once
#include "core/comm.h"
#include "operators/attention.h"

namespace pith {

// Ring attention (Liu et al., arXiv 2310.01889) over zigzag chunks. q (T, Hq, D), k (T, Hkv, D), v
// (T, Hkv, Dv): the local tokens of a micro-batch that was split over `context`, `ring` its steps
// -> (T, Hq, Dv). `sinks` as in attention(), counted once all keys are. The same values as
// attention() on the unsplit rows. Partial results are merged in FP32 (FP64 for FP64). Collective:
// every member calls it, and the backward pass, in the same order.
Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v,
    const std::vector<RingStep>& ring, double scale, const Comm& context,
    const Parameter* sinks = nullptr);

// The same with options.window, of a micro-batch that was split for it, without a ring: keys and
// values that the window reaches come from the ranks that hold them; their gradients go back and
// are added in one order. `halo` and `context` must outlive the backward pass.
Tensor window_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Halo& halo,
    double scale, const AttentionOptions& options, const Comm& context);

// Adds to `whole`, in place, what these rows of it get from other keys, with weights w = exp(lse):
// out = (w out + w' out') / (w + w').
void merge(const AttentionPart& whole, const RowSet& rows, const AttentionPart& part);

// The one step of rows that are not split, for a `context` of one process.
std::vector<RingStep> whole_ring(const AttentionSpan& span, int64_t tokens);

// Keys (T, H, Dn + Dr) and values (T, H, Dv) of latent (T, R), rotary_key (T, Dr) shared by all
// heads, up (H (Dn + Dv), R): for each head the rows of its key's first Dn elements, then of its
// value. Differentiable.
std::array<Tensor, 2> expand_latent(
    const Tensor& latent, const Tensor& rotary_key, Parameter& up, int64_t heads, int64_t v_dim);

// ring_attention() of q (T, H, Dn + Dr) over expand_latent's keys and values -> (T, H, Dv).
// Latents and rotary keys travel and are saved, with q, the result and its log-sum-exp; keys and
// values are made from them where they are used, in the backward pass again, which adds into
// up.grad in FP32.
Tensor latent_attention(const Tensor& q, const Tensor& latent, const Tensor& rotary_key,
    Parameter& up, int64_t v_dim, const std::vector<RingStep>& ring, double scale,
    const Comm& context = {});

}
