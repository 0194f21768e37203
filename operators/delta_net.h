// Gated delta net (Yang et al. 2025, arXiv 2412.06464): short convolution, gated delta rule, gates.
#pragma once
#include "core/comm.h"
#include "core/parameter.h"

namespace pith {

// How T tokens lie: `count` parts of T / count neighbours each. A part begins with a document, goes
// on from a state, or, where rows are split over `context`, from another rank's part: then a row is
// two parts, as split_context leaves it. Documents begin at positions of 0, anywhere.
struct TokenParts {
  Tensor positions;  // (T) int32, inside the document
  int64_t count = 1;
  Comm context = {};
};
// As many parts as there are rows, where these are equally long; else 1, or, split over several
// ranks, an Error. cu_seqlens_host: document borders of the unsplit rows.
TokenParts token_parts(
    const Tensor& positions, const Tensor& cu_seqlens_host, int64_t rows, const Comm& context = {});

// Depthwise causal convolution, then SiLU: x (T, C), weight (C, 1, K) -> (T, C): silu(sum over j <
// K of weight[:, 0, K - 1 - j] x[t - j]) over tokens of t's document, in FP32, rounded once.
// `state` (parts, K - 1, C), if defined: the tokens before each part, replaced by its last ones (no
// gradient). Saves x, which may be a strided view. With a context it is collective.
Tensor causal_convolution(
    const Tensor& x, Parameter& weight, const TokenParts& parts, const Tensor& state = {});

// What generation keeps of a layer: causal_convolution's and gated_delta_rule's state.
struct DeltaCache {
  Tensor tokens, state;
};

// What a head forgets and how strongly it writes: log decay g = -exp(a_log) softplus(a + dt_bias),
// beta = sigmoid(b).
struct DeltaGates {
  Tensor a, b;                 // (T, Hv)
  Parameter &a_log, &dt_bias;  // (Hv)
};
// q, k (T, Hk, Dk), v (T, Hv, Dv), Hk divides Hv -> (T, Hv, Dv), value head h with key head
// h / (Hv / Hk): with q and k L2-normalised, q divided by sqrt(Dk), and S (Dk, Dv) = 0 before a
// document's first token, for each token S = exp(g) S; S += k beta (v - S^T k)^T; out = S^T q.
// Computed in chunks in the WY form (arXiv 2406.06484), in FP32 (FP64 for FP64), rounded once;
// states go from chunk to chunk by one product each. `state` (parts, Hv, Dk, Dv), if defined: S
// before each part, replaced by that after it (no gradient). Saves its inputs; backward recomputes
// the rest and adds the gradients of a_log and dt_bias. With a context, every part's transition and
// state travel once forward and once backward (collective), and nobody waits for a scan.
Tensor gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const DeltaGates& gates,
    const TokenParts& parts, const Tensor& state = {}, int64_t chunk = 64);

// x * sigmoid(gate), or x * silu(gate), in FP32, rounded once: gate of x's shape, or with a last
// dimension of 1. Saves both.
Tensor gated(const Tensor& x, const Tensor& gate, bool silu = false);

}  // namespace pith
