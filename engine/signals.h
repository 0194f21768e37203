// Ctrl-C and SIGTERM: the first asks for a save at the end of the step, the second exits at once.
#pragma once
namespace pith {

// Takes over SIGINT, SIGTERM and SIGUSR1 (how `pithtrain launch` and batch systems pass on a stop;
// silent, and never ends the process by itself). The first one sets the flag and prints one line on
// stderr; a second one exits with status 130, unless it follows within 0.1 s: `timeout` and some
// launchers deliver a signal twice. Ignores SIGPIPE: a run outlives the reader of its output.
void install_signal_handlers();
bool stop_requested();

}  // namespace pith
