// The commands of the program: each apps/NAME.cpp adds its own to the command line. Also what
// several of them use.
#pragma once
#include <CLI/CLI.hpp>

namespace pith {

// A subcommand that calls run(options), and its options, which live as long as it. It reports
// failure by throwing: pith::Error for what a person can mend, CLI::RuntimeError(1) where
// everything has been printed already. main() turns both into a message and an exit status.
template <class Options, class Run>
std::pair<CLI::App*, Options*> add_command(
    CLI::App& app, const std::string& name, const std::string& what, Run run) {
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(name, what);
  command->callback([options, run] { run(*options); });
  return {command, options.get()};
}

void add_corpus_command(CLI::App& app);
void add_corpus_build_command(CLI::App& corpus);
void add_pretrain_command(CLI::App& app);
void add_schedule_command(CLI::App& app);
void add_generate_command(CLI::App& app);
void add_launch_command(CLI::App& app);
void add_inspect_command(CLI::App& app);
void add_tokenizer_command(CLI::App& app);
void add_trace_command(CLI::App& app);

// Prints what the corpus is and what is damaged in it, which ends the command with status 1.
// `quick`: no sums of data.
void inspect_corpus(const std::string& prefix, bool quick);

inline double real(std::integral auto number) { return static_cast<double>(number); }
std::string human_bytes(uint64_t bytes);  // "1.42MB", decimal units
inline std::string grouped(int64_t number) {  // "1,234,567"
  return fmt::to_string(fmt::group_digits(number));
}

// A line of a report: two columns.
template <class... Values>
void line(const std::string& label, fmt::format_string<Values...> text, Values&&... values) {
  fmt::print("  {:<12} {}\n", label, fmt::format(text, std::forward<Values>(values)...));
}

// Do two paths, of which the last parts need not exist, name one place?
inline bool same_place(const std::filesystem::path& a, const std::filesystem::path& b) {
  return std::filesystem::weakly_canonical(a) == std::filesystem::weakly_canonical(b);
}

}  // namespace pith
