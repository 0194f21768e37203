// pithtrain launch: the processes of one job on this machine, through mpirun.
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "apps/commands.h"
#include "core/error.h"
#include "engine/signals.h"

namespace pith {
namespace {

namespace fs = std::filesystem;

// The mpirun of the wheels this program was built with, else that of PATH; MPIRUN goes first.
std::string find_mpirun(const fs::path& self) {
  if (const char* chosen = std::getenv("MPIRUN")) return chosen;
  const fs::path own = self.parent_path() / PITH_DEPS_FROM_PROGRAM / "bin/mpirun";
  return fs::exists(own) ? own.lexically_normal().string() : "mpirun";
}

// Turns mpirun's "[1,3]<stdout>: text" into "[3] text". What mpirun says itself is kept back: it
// is shown if no rank has said why the job failed.
class Stream {
 public:
  Stream(int descriptor, std::FILE* to) : descriptor_(descriptor), to_(to) {}

  int descriptor() const { return descriptor_; }  // -1 at the end
  bool told_failure() const { return told_failure_; }
  const std::string& of_mpirun() const { return of_mpirun_; }

  void read_some() {
    std::array<char, 65536> buffer;
    const ssize_t size = read(descriptor_, buffer.data(), buffer.size());
    if (size < 0 && errno == EINTR) return;
    rest_.append(buffer.data(), static_cast<size_t>(std::max<ssize_t>(size, 0)));
    size_t begin = 0;
    for (size_t end; (end = rest_.find('\n', begin)) != rest_.npos; begin = end + 1)
      show(std::string_view(rest_).substr(begin, end - begin));
    rest_.erase(0, begin);
    std::fflush(to_);
    if (size > 0) return;
    if (!rest_.empty()) show(rest_);
    close(descriptor_);
    descriptor_ = -1;
  }

 private:
  void show(std::string_view line) {
    const size_t comma = line.find(','), tag_end = line.find(">: ");
    const bool tagged = line.starts_with('[') && tag_end != line.npos && comma < tag_end;
    if (!tagged) {
      if (line.find_first_not_of("- ") != line.npos) of_mpirun_ += fmt::format("  {}\n", line);
      return;
    }
    const std::string_view rank = line.substr(comma + 1, line.find(']') - comma - 1);
    const std::string_view text = line.substr(tag_end + 3);
    told_failure_ = told_failure_ || text.starts_with("FAILED rank ");
    fmt::print(to_, "[{}] {}\n", rank, text);
  }

  int descriptor_;
  std::FILE* to_;
  std::string rest_, of_mpirun_;
  bool told_failure_ = false;
};

int launch(int64_t processes, const fs::path& program, const std::vector<std::string>& command) {
  const auto cores = static_cast<int64_t>(std::max(1U, std::thread::hardware_concurrency()));
  const std::string mpirun = find_mpirun(fs::read_symlink("/proc/self/exe"));
  std::vector<std::string> words{
      mpirun,     "-n", std::to_string(processes), "--oversubscribe", "--bind-to", "none",
      "--output", "tag"};
  if (processes > cores) words.insert(words.end(), {"--mca", "mpi_yield_when_idle", "1"});
  words.push_back(program.string());
  words.insert(words.end(), command.begin(), command.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
  setenv("OMP_NUM_THREADS", std::to_string(std::max<int64_t>(1, cores / processes)).c_str(), 0);

  install_signal_handlers();
  std::array<int, 2> out{}, err{};
  PITH_CHECK(pipe2(out.data(), O_CLOEXEC) == 0 && pipe2(err.data(), O_CLOEXEC) == 0, "no pipe: {}",
             strerror(errno));
  const pid_t child = fork();
  PITH_CHECK(child >= 0, "no process: {}", strerror(errno));
  if (child == 0) {
    setpgid(0, 0);  // Ctrl-C reaches mpirun through this program only
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    std::signal(SIGPIPE, SIG_DFL);
    const int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    dup2(err[1], STDERR_FILENO);
    execvp(arguments[0], arguments.data());
    fmt::print(stderr, "{} cannot be started: {}; run ./pith setup\n", mpirun, strerror(errno));
    _exit(127);
  }
  close(out[1]);
  close(err[1]);

  std::array<Stream, 2> streams{Stream(out[0], stdout), Stream(err[0], stderr)};
  bool passed_on = false;
  while (streams[0].descriptor() >= 0 || streams[1].descriptor() >= 0) {
    std::array<pollfd, 2> waiting{pollfd{streams[0].descriptor(), POLLIN, 0},
                                  pollfd{streams[1].descriptor(), POLLIN, 0}};
    poll(waiting.data(), waiting.size(), 200);
    for (size_t i = 0; i < streams.size(); ++i) {
      if (waiting[i].revents != 0) streams[i].read_some();
    }
    // mpirun kills its ranks half a second after SIGINT or SIGTERM; SIGUSR1 it passes on to them.
    if (stop_requested() && !std::exchange(passed_on, true)) kill(child, SIGUSR1);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
  std::string text = streams[0].of_mpirun() + streams[1].of_mpirun();
  if (streams[0].told_failure() || streams[1].told_failure() || text.empty()) text.clear();
  fmt::print(stderr, "pithtrain launch: the job failed{}\n{}",
             text.empty() ? "" : "; mpirun says:", text);
  return 1;
}

}  // namespace

void add_launch_command(CLI::App& app) {
  struct Options {
    int64_t processes = 0;
    std::string program = fs::read_symlink("/proc/self/exe");
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "launch", "Run a command as N processes on this machine, which share the work (MPI, NCCL)");
  command->add_option("processes", options->processes, "How many")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  command->add_option("--program", options->program)->group("");  // for tests
  command->prefix_command();
  command->footer(
      "Each line of output starts with its rank. Ctrl-C or SIGTERM lets every rank finish its "
      "step\n"
      "and save; a second one ends them at once. When one rank fails, all end.\n\n"
      "Example: pithtrain launch 2 pretrain run.toml");
  command->callback([options, command] {
    const std::vector<std::string> words = command->remaining();
    PITH_CHECK(!words.empty(), "no command to launch; try: launch {} pretrain run.toml",
               options->processes);
    if (const int status = launch(options->processes, options->program, words); status != 0)
      throw CLI::RuntimeError(status);
  });
}

}  // namespace pith
