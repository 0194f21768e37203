#include <unistd.h>
#include "core/comm.h"
#include "engine/metrics.h"

namespace pith {
namespace {
std::atomic<int64_t> first_signal_ns{0}; // 0 = none yet
bool in_job = false; // of several processes: there SIGTERM comes after another rank's failure
static_assert(std::atomic<int64_t>::is_always_lock_free, "used inside a signal handler");

// Calls only what POSIX lists as async-signal-safe: clock_gettime, write, _exit.
void handle_stop(int signal) {
  constexpr int64_t kSameEvent = 100'000'000;
  const int saved_errno = errno;
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  const int64_t now = int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  int64_t first = 0;
  if (first_signal_ns.compare_exchange_strong(first, now)) {
    constexpr string_view text =
      "\nstopping: this step is finished and saved first; once more to exit at once\n";
    if (signal != SIGUSR1 && !in_job) [[maybe_unused]]
      const auto written = write(STDERR_FILENO, text.data(), text.size());
  } else if (signal != SIGUSR1 && now - first > kSameEvent) {
    _exit(130);
  }
  errno = saved_errno;
}
}

void install_signal_handlers() {
  first_signal_ns = 0;
  in_job = launch_info().size > 1;
  struct sigaction action{};
  action.sa_handler = handle_stop;
  action.sa_flags = SA_RESTART; // a read or write in progress goes on
  sigemptyset(&action.sa_mask);
  for (const int signal: {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

bool stop_requested() { return first_signal_ns != 0; }
}
