#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>
#include <string>
#include "engine/metrics.h"

namespace pith {
namespace {
struct Outcome {
  int status;
  std::string text; // its stderr
};

// Runs `body` in a process of its own.
template <class Body> Outcome in_child(Body body) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    install_signal_handlers();
    _exit(body());
  }
  close(ends[1]);
  Outcome outcome{0, ""};
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    outcome.text.append(buffer, static_cast<size_t>(n));
  }
  close(ends[0]);
  waitpid(child, &outcome.status, 0);
  return outcome;
}

TEST(Signals, FirstOneAsksToStop) {
  for (const int signal: {SIGINT, SIGTERM}) {
    const Outcome outcome = in_child([signal] {
      if (stop_requested()) return 1;
      errno = 77;
      kill(getpid(), signal);
      return stop_requested() && errno == 77 ? 0 : 2;
    });
    EXPECT_TRUE(WIFEXITED(outcome.status));
    EXPECT_EQ(WEXITSTATUS(outcome.status), 0);
    EXPECT_EQ(outcome.text,
      "\nstopping: this step is finished and saved first; once more to exit at once\n");
  }
}

TEST(Signals, SecondOneExitsAtOnce) {
  const Outcome outcome = in_child([] {
    kill(getpid(), SIGTERM);
    usleep(150'000);
    kill(getpid(), SIGINT);
    return 3;
  });
  EXPECT_TRUE(WIFEXITED(outcome.status));
  EXPECT_EQ(WEXITSTATUS(outcome.status), 130);
}

// `timeout` signals its child and then the whole group.
TEST(Signals, TheSameSignalDeliveredTwiceIsOne) {
  const Outcome outcome = in_child([] {
    kill(getpid(), SIGTERM);
    kill(getpid(), SIGTERM);
    return stop_requested() ? 0 : 1;
  });
  EXPECT_TRUE(WIFEXITED(outcome.status));
  EXPECT_EQ(WEXITSTATUS(outcome.status), 0);
}

TEST(Signals, ABrokenPipeDoesNotKill) {
  const Outcome outcome = in_child([] {
    int ends[2];
    if (pipe(ends) != 0) return 1;
    close(ends[0]);
    return write(ends[1], "x", 1) == -1 && errno == EPIPE ? 0 : 2;
  });
  EXPECT_TRUE(WIFEXITED(outcome.status));
  EXPECT_EQ(WEXITSTATUS(outcome.status), 0);
}

} // namespace
} // namespace pith
