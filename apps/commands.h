// The commands of the program: each apps/NAME.cpp adds its own to the command line.
#pragma once

namespace CLI {
class App;
}

namespace pith {

// Each adds one subcommand with its options and a callback that does the work. A callback reports
// failure by throwing: pith::Error for what a person can mend, CLI::RuntimeError(1) where
// everything has been printed already. main() turns both into a message and an exit status.
void add_corpus_command(CLI::App& app);
void add_pretrain_command(CLI::App& app);
void add_schedule_command(CLI::App& app);
void add_generate_command(CLI::App& app);
void add_launch_command(CLI::App& app);
void add_inspect_command(CLI::App& app);
void add_tokenizer_command(CLI::App& app);
void add_trace_command(CLI::App& app);

}  // namespace pith
