// The program: the list of its commands, and the one place where errors become messages.
#include <c10/util/Exception.h>
#include <torch/version.h>
#include "apps/commands.h"
#include "build_info.h"
#include "core/comm.h"

namespace {
constexpr const char* kFooter = R"(
A run, from text to text:
  pithtrain corpus build --out corpus/train src/       make a corpus of the files under src/
  pithtrain pretrain run.toml                          train what run.toml describes
  pithtrain pretrain run.toml --set training.lr=1e-4   the same with another learning rate
  pithtrain inspect runs/run/checkpoints/step-00001000 explain a checkpoint, model or corpus
  pithtrain generate runs/run/checkpoints/step-00001000 --prompt "int main"

Each command explains itself: pithtrain COMMAND --help. Examples of run.toml: examples/.
Exit status: 0 done, 1 failed (the last lines on stderr say why), 2 wrong usage.)";

// The innermost command that was named on the command line.
const CLI::App* deepest(const CLI::App& app) {
  const CLI::App* found = &app;
  while (!found->get_subcommands().empty()) found = found->get_subcommands().front();
  return found;
}

std::string full_name(const CLI::App* app) {
  const CLI::App* parent = app->get_parent();
  return parent ? full_name(parent) + " " + app->get_name() : app->get_name();
}

// What is wrong with a command line: a word that no command or option of it takes, or else.
std::string usage_problem(const CLI::App& command, const CLI::ParseError& error) {
  for (const CLI::App* app = &command; app != nullptr; app = app->get_parent())
    for (const std::string& word: app->remaining())
      if (word != "--") return fmt::format("{} is not known here", word);
  return error.what();
}

int run(CLI::App& app, int argc, char** argv) {
  const auto fail = [&](const std::string& text) {
    std::fflush(stdout); // so that the reason stands last, also where both go to one file
    const bool list = text.find('\n') < text.find("\n  "); // several mistakes: a line for each
    const std::string line = full_name(deepest(app)) + (list ? ":\n" : ": ") + text;
    pith::end_all_ranks(line);
    std::fputs((line + "\n").c_str(), stderr);
    return 1;
  };
  try {
    app.parse(argc, argv);
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::Success& error) { // --help, --version
    app.exit(error);
  } catch (const CLI::ParseError& error) {
    const CLI::App* command = deepest(app);
    fail(usage_problem(*command, error));
    std::fputs(fmt::format("see {} --help\n", full_name(command)).c_str(), stderr);
    return 2;
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return fail("out of memory");
  } catch (const std::exception& error) { return fail(error.what()); }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    return fail("standard output could not be written");
  return 0;
}
}

int main(int argc, char** argv) {
  CLI::App app("Trains Mixture-of-Experts language models, on CPUs and GPUs.\n", "pithtrain");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.set_help_flag("-h,--help", "Explain and exit");
  app.set_version_flag("--version",
    fmt::format("pithtrain {}, LibTorch {}", pith::kBuildDescription, TORCH_VERSION),
    "Print what this program was built from and exit");
  pith::add_corpus_command(app);
  pith::add_pretrain_command(app);
  pith::add_generate_command(app);
  pith::add_launch_command(app);
  pith::add_estimate_command(app);
  pith::add_convert_command(app);
  pith::add_report_command(app);
  pith::add_inspect_command(app);
  pith::add_schedule_command(app);
  pith::add_tokenizer_command(app);
  pith::add_trace_command(app);
  return run(app, argc, argv);
}
