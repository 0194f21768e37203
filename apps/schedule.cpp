// pithtrain schedule: prints, simulates and draws the pipeline schedule that pretrain executes.
#include "engine/schedule.h"
#include "apps/commands.h"
#include "engine/file_io.h"

namespace pith {
namespace {
struct Options {
  int64_t stages = 1, microbatches = 8;
  StageCosts costs;
  HeadCosts head;
  string svg;
};

void print(const Options& options) {
  const Simulation s = simulate(options.stages, options.microbatches, true,
    vector<StageCosts>(index(2 * options.stages), options.costs), options.head);
  fmt::print(
    "F, B, W: forward, backward, weight gradients (I: a backward without them) of "
    "CHUNK:MICRO-BATCH, chunk 0 = r, 1 = 2P-1-r; |: one against the other; H: a shared head\n");
  for (size_t rank = 0; rank < s.actions.size(); ++rank) {
    fmt::print("rank {:2}  bubble {:.4g} of {:.4g} ({:.1f} %), at most {} chunks kept\n", rank,
      s.bubble[rank], s.makespan, 100 * s.bubble[rank] / s.makespan, s.peak_activations[rank]);
    fmt::print("  {}\n", to_string(s.actions[rank]));
  }
  if (!options.svg.empty()) write_file({}, options.svg, draw_svg(s));
}
}

void add_schedule_command(CLI::App& app) {
  const auto [sub, o] = add_command<Options>(
    app, "schedule", "Print, simulate and draw a pipeline schedule (DualPipeV)", print);
  sub->add_option("--pp", o->stages, "Pipeline stages")->check(CLI::Range(1, 1024));
  sub->add_option("--microbatches", o->microbatches, "Micro-batches a step")
    ->check(CLI::Range(1, 100000));
  sub->add_option("--forward", o->costs.forward, "Time of one chunk's forward");
  sub->add_option("--backward", o->costs.backward_input, "Of its input gradients");
  sub->add_option("--weight", o->costs.weight, "Of its weight gradients");
  sub->add_option("--hidden", o->costs.hidden, "Saved where a forward runs against a backward");
  sub->add_option("--head", o->head.cost, "Of the head, forward and backward, in the last forward");
  sub->add_option("--head-share", o->head.share, "Share of it on rank 1")
    ->check(CLI::Range(0.0, 0.99));
  sub->add_option("--svg", o->svg, "Also draw it into this file");
  sub->footer("Example: pithtrain schedule --pp 4 --microbatches 16 --svg schedule.svg");
}
}
