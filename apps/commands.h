// The commands of the program, which each apps/NAME.cpp adds, and what several of them use.
#pragma once
#include <CLI/CLI.hpp>

namespace pith {
using Clock = chrono::steady_clock;
inline double seconds_since(Clock::time_point start) {
  return chrono::duration<double>(Clock::now() - start).count();
}

// A subcommand that calls run(options), and its options, which live as long as it. It fails by
// throwing, for main() to print; CLI::RuntimeError(1) where everything has been printed already.
template <class Options, class Run> pair<CLI::App*, Options*> add_command(
  CLI::App& app, const string& name, const string& what, Run run) {
  const auto options = make_shared<Options>();
  CLI::App* command = app.add_subcommand(name, what);
  command->callback([options, run] { run(*options); });
  return {command, options.get()};
}

void add_corpus_command(CLI::App& app);
void add_pretrain_command(CLI::App& app);
void add_convert_command(CLI::App& app);
void add_estimate_command(CLI::App& app);
void add_report_command(CLI::App& app);
void add_schedule_command(CLI::App& app);
void add_generate_command(CLI::App& app);
void add_launch_command(CLI::App& app);
// Also as a command of another name, or of `corpus`; `quick`: it never sums data.
void add_inspect_command(CLI::App& app, const string& name = "inspect",
  const string& what = "Explain a corpus, checkpoint, run folder, model folder or safetensors file",
  bool quick = false);
void add_tokenizer_command(CLI::App& app);
void add_trace_command(CLI::App& app);

// The model_type of a config.json, or of the one in a folder.
string read_model_type(const fs::path& path);

string human_bytes(uint64_t bytes); // "1.42MB", decimal units
inline string grouped(int64_t number) { // "1,234,567"
  return fmt::to_string(fmt::group_digits(number));
}

// A line of a report: two columns.
template <class... Values>
void line(const string& label, fmt::format_string<Values...> text, Values&&... values) {
  fmt::print("  {:<12} {}\n", label, fmt::format(text, std::forward<Values>(values)...));
}
}
