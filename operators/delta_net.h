// Gated delta net (Yang et al. 2025, arXiv 2412.06464): short convolution, gated delta rule.
#pragma once
#include "core/comm.h"
#include "core/parameter.h"

namespace pith {
// T tokens in `count` parts of T / count neighbours. A part begins with a document, goes on from a
// state, or, where rows are split over `context`, from another rank's part; a row is then two parts
// (split_context). Documents begin at positions of 0.
struct TokenParts {
  Tensor positions; // (T) int32, inside the document
  int64_t count = 1;
  Comm context = {};
};
// As many parts as rows of equal length; else 1, or, split, an Error. Borders: of unsplit rows.
TokenParts token_parts(
  const Tensor& positions, const Tensor& cu_seqlens_host, int64_t rows, const Comm& context = {});

// Generation's `state` of both functions below: read and replaced, without gradients.
struct DeltaCache {
  Tensor tokens, state;
};

// Depthwise causal convolution, SiLU: x (T, C), weight (C, 1, K) -> (T, C): silu(sum over j < K of
// weight[:, 0, K - 1 - j] x[t - j]) over t's document, in FP32, rounded once. `state` (parts, K -
// 1, C): the tokens before each part. Saves x, which may be a strided view. Collective with a
// context; parts then have at least K - 1 tokens.
Tensor causal_convolution(
  const Tensor& x, Parameter& weight, const TokenParts& parts, const Tensor& state = {});

// Of a head: log decay g = -exp(a_log) softplus(a + dt_bias), writing beta = sigmoid(b).
struct DeltaGates {
  Tensor a, b; // (T, Hv)
  Parameter &a_log, &dt_bias; // (Hv)
};
// q, k (T, Hk, Dk), v (T, Hv, Dv), Hk divides Hv -> (T, Hv, Dv), value head h with key head h / (Hv
// / Hk): q and k are L2-normalised, q divided by sqrt(Dk); S (Dk, Dv) is 0 before a document; a
// token makes S = exp(g) S, S += k beta (v - S^T k)^T, out = S^T q. Chunks in WY form (arXiv
// 2406.06484), FP32 (FP64 for FP64), rounded once. `state` (parts, Hv, Dk, Dv): S before each part.
// Saves its inputs; backward makes the rest again and adds the parameters' gradients. With a
// context each part's transition and state travel, once each way (collective).
Tensor gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const DeltaGates& gates,
  const TokenParts& parts, const Tensor& state = {}, int64_t chunk = 64);
}
