// The learning rate as a closed form of the step number; no state, so resuming cannot shift it.
#pragma once
#include <map>

#include "engine/config.h"

namespace pith {

// Rate of update `step` (1 = the first, training.steps = the last; later steps stay at the floor).
//   warm-up   lr * step / warmup_steps, up to and including step warmup_steps; then
//   constant  lr
//   cosine    half a cosine from lr (end of warm-up) to min_lr_ratio * lr (last step);
//             Loshchilov and Hutter 2017, arXiv 1608.03983
//   wsd       lr, then linear over the last decay_steps steps to min_lr_ratio * lr;
//             Hu et al. 2024, arXiv 2404.06395
double learning_rate(const RunConfig::Training& training, int64_t step);

// The keys that the rate depends on, with their values: "training.lr" -> "0.0003", ...
std::map<std::string, std::string> schedule_settings(const RunConfig::Training& training);

}  // namespace pith
