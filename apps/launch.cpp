// pithtrain launch: the processes of one job on this machine, through mpirun.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "apps/commands.h"
#include "engine/metrics.h"

namespace pith {
namespace {
// Turns mpirun's "[1,3]<stderr>: text" into "[3] text". What mpirun says itself is shown if no rank
// has said why the job failed.
struct Output {
  string of_mpirun;
  bool told_failure = false;

  void show(string_view line) {
    const size_t comma = line.find(','), tag_end = line.find(">: ");
    if (!line.starts_with('[') || tag_end == line.npos || comma > tag_end) {
      if (line.find_first_not_of("- ") != line.npos) of_mpirun += fmt::format("  {}\n", line);
      return;
    }
    const string_view rank = line.substr(comma + 1, line.find(']') - comma - 1);
    const string_view text = line.substr(tag_end + 3);
    told_failure = told_failure || text.starts_with("FAILED rank ");
    std::FILE* to = line.substr(0, tag_end).ends_with("<stderr") ? stderr : stdout;
    fmt::print(to, "[{}] {}\n", rank, text);
    std::fflush(to);
  }
};

struct Options {
  int64_t processes = 0;
  string program = fs::read_symlink("/proc/self/exe");
  const CLI::App* command = nullptr; // knows the words behind the number
};

void launch(const Options& options) {
  const int64_t processes = options.processes;
  const vector<string> command = options.command->remaining();
  PITH_CHECK(!command.empty(), "no command to launch; try: launch {} pretrain run.toml", processes);
  const int64_t cores = max(1U, thread::hardware_concurrency());
  // The mpirun of the wheels this program was built with, else that of PATH; MPIRUN goes first.
  const fs::path self = fs::read_symlink("/proc/self/exe");
  const fs::path own = self.parent_path() / PITH_DEPS_FROM_PROGRAM / "bin/mpirun";
  const char* chosen = std::getenv("MPIRUN");
  const string mpirun = chosen ? chosen : fs::exists(own) ? own.string() : "mpirun";
  vector<string> words{
    mpirun, "-n", to_string(processes), "--oversubscribe", "--bind-to", "none", "--output", "tag"};
  if (processes > cores) words.insert(words.end(), {"--mca", "mpi_yield_when_idle", "1"});
  words.push_back(options.program);
  words.insert(words.end(), command.begin(), command.end());
  vector<char*> arguments;
  for (string& word: words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
  setenv("OMP_NUM_THREADS", to_string(max<int64_t>(1, cores / processes)).c_str(), 0);

  install_signal_handlers();
  array<int, 2> ends{};
  PITH_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0, "no pipe: {}", strerror(errno));
  const pid_t child = fork();
  PITH_CHECK(child >= 0, "no process: {}", strerror(errno));
  if (child == 0) {
    setpgid(0, 0); // Ctrl-C reaches mpirun through this program only
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    std::signal(SIGPIPE, SIG_DFL);
    const int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    execvp(arguments[0], arguments.data());
    fmt::print(stderr, "{} cannot be started: {}; run ./pith setup\n", mpirun, strerror(errno));
    _exit(127);
  }
  close(ends[1]);

  Output output;
  thread reader([&] {
    ifstream lines(fmt::format("/dev/fd/{}", ends[0]));
    for (string line; getline(lines, line);) output.show(line);
  });
  bool passed_on = false;
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    // mpirun kills its ranks half a second after SIGINT or SIGTERM; SIGUSR1 it passes on to them.
    if (stop_requested() && !exchange(passed_on, true)) kill(child, SIGUSR1);
    std::this_thread::sleep_for(chrono::milliseconds(50));
  }
  reader.join();
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  const bool explain = !output.told_failure && !output.of_mpirun.empty();
  fmt::print(stderr, "pithtrain launch: the job failed{}\n{}", explain ? "; mpirun says:" : "",
    explain ? output.of_mpirun : "");
  throw CLI::RuntimeError(1);
}
}

void add_launch_command(CLI::App& app) {
  const auto [sub, o] = add_command<Options>(app, "launch",
    "Run a command as N processes on this machine, which share the work (MPI, NCCL)", launch);
  o->command = sub;
  sub->add_option("processes", o->processes, "How many")
    ->required()
    ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  sub->add_option("--program", o->program)->group(""); // for tests
  sub->prefix_command();
  sub->footer(
    "Each line of output starts with its rank. Ctrl-C or SIGTERM lets every rank finish its "
    "step\n"
    "and save; a second one ends them at once. When one rank fails, all end.\n\n"
    "Example: pithtrain launch 2 pretrain run.toml");
}
}
