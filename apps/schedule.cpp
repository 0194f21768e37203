// pithtrain schedule: prints, simulates and draws the pipeline schedule that pretrain executes.
#include "engine/schedule.h"

#include <CLI/CLI.hpp>

#include "apps/commands.h"
#include "engine/file_io.h"

namespace pith {

void add_schedule_command(CLI::App& app) {
  struct Options {
    int64_t stages = 1, microbatches = 8;
    StageCosts costs;
    std::string svg;
    bool list = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("schedule", "Print, simulate and draw a pipeline schedule (DualPipeV)");
  command->add_option("--pp", options->stages, "Pipeline stages")->check(CLI::Range(1, 1024));
  command->add_option("--microbatches", options->microbatches, "Micro-batches a step")
      ->check(CLI::Range(1, 100000));
  command->add_option("--forward", options->costs.forward, "Time of one chunk's forward");
  command->add_option("--backward", options->costs.backward_input, "Of its input gradients");
  command->add_option("--weight", options->costs.weight, "Of its weight gradients");
  command->add_option(
      "--hidden", options->costs.hidden, "Saved where a forward runs against a backward");
  command->add_option("--svg", options->svg, "Also draw it into this file");
  command->add_flag("--list", options->list, "Also list each rank's actions");
  command->footer("Example: pithtrain schedule --pp 4 --microbatches 16 --svg schedule.svg");
  command->callback([options] {
    const Simulation s = simulate(options->stages, options->microbatches, true,
        std::vector<StageCosts>(static_cast<size_t>(2 * options->stages), options->costs));
    fmt::print(
        "{}F, B, W: forward, backward, weight gradients of chunk r; small letters: of chunk "
        "2P-1-r; x: a forward against a backward\n",
        draw_text(s));
    for (size_t rank = 0; rank < s.actions.size(); ++rank) {
      fmt::print("rank {:2}  bubble {:.4g} of {:.4g} ({:.1f} %), at most {} chunks kept\n", rank,
          s.bubble[rank], s.makespan, 100 * s.bubble[rank] / s.makespan, s.peak_activations[rank]);
      if (options->list) fmt::print("  {}\n", to_string(s.actions[rank]));
    }
    if (!options->svg.empty()) write_file({}, options->svg, draw_svg(s));
  });
}

}  // namespace pith
