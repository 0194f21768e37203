// Drawing the next token from logits, on the host, reproducibly.
#pragma once
namespace pith {
struct SamplingOptions {
  double temperature = 1; // 0 = greedy: the highest logit
  double top_p = 1; // 1 = off
  double min_p = 0; // 0 = off
  int64_t top_k = 0; // 0 = off
  uint64_t seed = 0;
};

// Index of the token drawn from `logits` (V). Filters, each on what the one before it left,
// renormalised, in the order of Hugging Face transformers:
//   temperature  softmax(logits / temperature)
//   top_k        the k most probable tokens
//   top_p        the fewest most probable tokens whose probabilities sum to at least top_p
//   min_p        the tokens of at least min_p times the highest probability
// The most probable token always stays; of equal logits the lower id ranks first. The draw is a
// function of (seed, draw_index, logits, options): give every token its own draw_index. FP64
// inside. A logit of -inf is never drawn; NaN, +inf, nothing left to draw or an option out of range
// is an Error.
int64_t sample(span<const float> logits, const SamplingOptions& options, uint64_t draw_index);
}
