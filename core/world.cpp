// The job: how its processes were started, the store they meet at, and the two threads that end all
// of them when one is lost. One thread talks to the store (the heartbeat); the other, the watchdog,
// only looks at clocks, so that a store that hangs cannot stop it.
#include <c10/util/Exception.h>
#include <c10/util/Flags.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/transport.h"

C10_DECLARE_int(caffe2_log_level);

namespace pith {
namespace {

using Clock = std::chrono::steady_clock;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

template <class Number>
Number number_in(const char* name, Number fallback) {
  const std::string text = environment(name);
  if (text.empty()) return fallback;
  Number value{};
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value);
  PITH_CHECK(end.ec == std::errc() && end.ptr == text.data() + text.size() && value >= 0,
             "environment variable {}='{}' is not a number", name, text);
  return value;
}

Launch read_launch() {
  Launch launch;
  const auto is_set = [](const char* name) { return !environment(name).empty(); };
  if (is_set("OMPI_COMM_WORLD_SIZE")) {  // mpirun
    launch = {number_in<int64_t>("OMPI_COMM_WORLD_RANK", 0),
              number_in<int64_t>("OMPI_COMM_WORLD_SIZE", 1),
              number_in<int64_t>("OMPI_COMM_WORLD_LOCAL_RANK", 0), true};
  } else if (is_set("RANK") && is_set("WORLD_SIZE")) {  // torchrun
    launch = {number_in<int64_t>("RANK", 0), number_in<int64_t>("WORLD_SIZE", 1),
              number_in<int64_t>("LOCAL_RANK", 0), false};
    PITH_CHECK(launch.size == 1 || (is_set("MASTER_ADDR") && is_set("MASTER_PORT")),
               "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT");
  } else if (number_in<int64_t>("SLURM_STEP_NUM_TASKS", 1) > 1) {  // srun
    launch = {number_in<int64_t>("SLURM_PROCID", 0), number_in<int64_t>("SLURM_STEP_NUM_TASKS", 1),
              number_in<int64_t>("SLURM_LOCALID", 0), true};
    if (!is_set("PMIX_RANK"))
      PITH_FAIL_HINT("use srun --mpi=pmix", "srun started {} tasks that cannot meet", launch.size);
  }
  PITH_CHECK(launch.rank < launch.size, "rank {} of {} processes", launch.rank, launch.size);
  launch.mpi = launch.mpi && launch.size > 1;
  return launch;
}

struct Watch {
  std::string what;
  double limit_s, age_s;
  std::function<bool()> done;
};

// What a running job of several processes has. Leaked: its threads may outlive main's unwinding.
struct Job {
  int64_t rank = launch_info().rank, size = launch_info().size;
  double heartbeat_s = number_in("PITH_HEARTBEAT_S", 20.0);
  double interval_s = heartbeat_s / 10;
  std::string prefix;
  c10::intrusive_ptr<c10d::Store> store, beats;  // main thread's and heartbeat's connection
  std::thread heartbeat, watchdog;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  bool stopping = false;
  std::string failure;  // of this rank, on its way to the store
  double since_beat_s = 0;
  std::string context, last_operation = "start";
  std::map<uint64_t, Watch> watches;
  uint64_t next_watch = 0;

  std::string key(const std::string& name) const { return prefix + name; }
};

Job* job = nullptr;

constexpr const char* kStoreLost =
    "rank 0 has ended or lost its connection: its store does not answer";

// A call to the store by the main thread.
template <class Call>
void with_store(const Call& call) {
  try {
    call();
  } catch (const c10::Error&) {
    end_all_ranks(kStoreLost);
  }
}

void print_failure(const std::string& text) {
  const std::string line = fmt::format("FAILED rank {}: {}\n", job->rank, text);
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
}

// Rank 0 has the store and cannot be asked who speaks: the lowest rank left does, since the
// launcher ends the others meanwhile.
[[noreturn]] void leave_without_store(const std::string& text) {
  const auto turn = std::chrono::milliseconds(500 * std::clamp<int64_t>(job->rank - 1, 0, 10));
  std::this_thread::sleep_for(turn);
  print_failure(text);
  _exit(1);
}

void sleep_seconds(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Steps of time that a stopped and continued job (a closed lid, SIGSTOP to all) does not jump over.
double step_since(Clock::time_point& last, double at_most_s) {
  const auto now = Clock::now();
  const double step = std::chrono::duration<double>(now - std::exchange(last, now)).count();
  return std::min(step, at_most_s);
}

std::string status_line(int64_t beat) {
  const std::lock_guard lock(job->mutex);
  return fmt::format("{}|{}{}{}", beat, job->context, job->context.empty() ? "" : ", ",
                     job->last_operation);
}

std::string after_bar(const std::string& beat) { return beat.substr(beat.find('|') + 1); }

std::string read_beat(int64_t rank) {
  return job->beats->get_to_str(job->key(fmt::format("beat/{}", rank)));
}

// Who failed first has said it. Rank 0 stays until the others have read it in its store.
[[noreturn]] void leave_quietly() {
  if (job->rank == 0) sleep_seconds(2.5 * job->interval_s);
  _exit(1);
}

// Makes `text` the first cause if there is none yet, and ends this process.
[[noreturn]] void fail_through_store(std::string text, bool with_status) {
  if (with_status) {
    for (int64_t rank = 0; rank < std::min<int64_t>(job->size, 64); ++rank)
      text += fmt::format("\n  rank {} was last seen at: {}", rank, after_bar(read_beat(rank)));
  }
  const std::string mine = fmt::format("{}|{}", job->rank, text);
  const bool first = job->beats->compareSet(job->key("failure"), std::string(), mine) == mine;
  if (first) print_failure(text);
  leave_quietly();
}

void run_heartbeat() {
  struct Seen {
    std::string beat;
    double age_s = 0;
  };
  std::vector<Seen> seen(static_cast<size_t>(job->size));
  auto last = Clock::now();
  for (int64_t beat = 1;; ++beat) {
    std::string failure;
    {
      std::unique_lock lock(job->mutex);
      job->changed.wait_for(lock, std::chrono::duration<double>(job->interval_s),
                            [] { return job->stopping || !job->failure.empty(); });
      if (job->stopping) return;
      failure = job->failure;
    }
    try {
      if (!failure.empty()) fail_through_store(failure, failure.starts_with("timeout"));
      job->beats->set(job->key(fmt::format("beat/{}", job->rank)), status_line(beat));
      if (job->beats->check({job->key("failure")})) leave_quietly();
      const double step_s = step_since(last, 2 * job->interval_s);
      const int64_t end = job->rank == 0 ? job->size : 1;  // rank 0 looks at all, the others at it
      for (int64_t rank = 0; rank < end; ++rank) {
        if (rank == job->rank) continue;
        Seen& other = seen[static_cast<size_t>(rank)];
        const std::string now = read_beat(rank);
        if (std::exchange(other.beat, now) != now) other.age_s = 0;
        other.age_s += step_s;
        if (other.age_s > job->heartbeat_s)
          fail_through_store(
              fmt::format("rank {} has given no sign of life for {:.0f} s (stopped, killed or its "
                          "machine lost); it was last seen at: {}",
                          rank, job->heartbeat_s, after_bar(now)),
              false);
      }
      const std::lock_guard lock(job->mutex);
      job->since_beat_s = 0;
    } catch (const std::exception&) {
      if (!failure.empty()) leave_without_store(failure);
      leave_without_store(kStoreLost);
    }
  }
}

void run_watchdog() {
  const double tick_s = std::clamp(std::min(job->heartbeat_s, comm_timeout_s()) / 40, 0.01, 1.0);
  auto last = Clock::now();
  for (;;) {
    std::vector<std::pair<uint64_t, std::function<bool()>>> questions;
    {
      std::unique_lock lock(job->mutex);
      job->changed.wait_for(lock, std::chrono::duration<double>(tick_s),
                            [] { return job->stopping; });
      if (job->stopping) return;
      const double step_s = step_since(last, 2 * tick_s);
      job->since_beat_s += step_s;
      if (job->since_beat_s > job->heartbeat_s + 2 * job->interval_s) {
        const std::string failure = job->failure;
        lock.unlock();
        leave_without_store(!failure.empty() ? failure
                                             : fmt::format("rank 0 has not answered for {:.0f} s "
                                                           "(stopped, or its machine lost)",
                                                           job->heartbeat_s));
      }
      for (auto& [id, entry] : job->watches) {
        entry.age_s += step_s;
        if (entry.done) questions.emplace_back(id, entry.done);
      }
    }
    for (const auto& [id, done] : questions) {
      if (done()) unwatch(id);
    }
    std::string late;
    {
      const std::lock_guard lock(job->mutex);
      for (const auto& [id, entry] : job->watches) {
        if (!late.empty() || entry.age_s <= entry.limit_s) continue;
        late =
            fmt::format("timeout: {} has not finished after {:.0f} s", entry.what, entry.limit_s);
      }
    }
    if (!late.empty()) end_all_ranks(late);
  }
}

c10::intrusive_ptr<c10d::Store> open_store() {
  // The C10d library reports lost connections in its own way as well; ours is enough.
  FLAGS_caffe2_log_level = 2;
  c10d::TCPStoreOptions options;
  options.isServer = job->rank == 0;
  options.waitWorkers = false;
  options.timeout = std::chrono::minutes(5);
  std::string host = "127.0.0.1";
  if (launch_info().mpi) {
    options.port = 0;
    c10::intrusive_ptr<c10d::TCPStore> server;
    if (job->rank == 0) {
      server = c10::make_intrusive<c10d::TCPStore>(host, options);
      std::vector<char> name(256);
      gethostname(name.data(), name.size() - 1);
      host = fmt::format("{} {}", name.data(), server->getPort());
    }
    const std::string address = mpi_broadcast_text(host);
    if (server) return server;
    const auto space = address.rfind(' ');
    host = address.substr(0, space);
    options.port = narrow<uint16_t>(std::stoi(address.substr(space + 1)));
    std::vector<char> name(256);
    gethostname(name.data(), name.size() - 1);
    if (host == name.data()) host = "127.0.0.1";
  } else {
    host = environment("MASTER_ADDR");
    options.port = narrow<uint16_t>(number_in<int64_t>("MASTER_PORT", 0));
    // torchrun's agent already serves a store at this address, also for earlier attempts.
    if (environment("TORCHELASTIC_USE_AGENT_STORE") == "True") options.isServer = false;
    job->prefix += environment("TORCHELASTIC_RESTART_COUNT") + "/";
  }
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

}  // namespace

const Launch& launch_info() {
  static const Launch launch = read_launch();
  return launch;
}

World::World() {
  if (launch_info().size == 1) return;
  PITH_CHECK(job == nullptr, "the world exists already");
  job = new Job;
  job->prefix = "pith/";
  set_error_context(fmt::format("rank {}", job->rank));
  if (launch_info().mpi) mpi_start();
  job->store = open_store();
  job->beats = job->store->clone();
  // Waits may last as long as a checkpoint of another rank; heartbeat and watchdog end them.
  job->store->setTimeout(std::chrono::hours(24 * 365));
  job->beats->set(job->key(fmt::format("beat/{}", job->rank)), status_line(0));
  store_set(fmt::format("here/{}", job->rank), "");
  std::vector<std::string> all;
  for (int64_t rank = 0; rank < job->size; ++rank) all.push_back(fmt::format("here/{}", rank));
  store_get(all);  // every beat stands in the store before anyone reads it
  job->heartbeat = std::thread(run_heartbeat);
  job->watchdog = std::thread(run_watchdog);
}

World::~World() {
  if (job == nullptr || std::uncaught_exceptions() > 0) return;
  try {
    note_operation("the end");
    std::vector<std::string> bye, gone;
    for (int64_t rank = 0; rank < job->size; ++rank) {
      bye.push_back(fmt::format("bye/{}", rank));
      gone.push_back(job->key(fmt::format("gone/{}", rank)));
    }
    store_set(bye[static_cast<size_t>(job->rank)], "");
    store_get(bye);  // as long as it takes: the heartbeat goes on meanwhile
    {
      const std::lock_guard lock(job->mutex);
      job->stopping = true;
    }
    job->changed.notify_all();
    job->heartbeat.join();
    job->watchdog.join();
    job->store->set(gone[static_cast<size_t>(job->rank)], std::string());
    if (job->rank == 0) job->store->wait(gone, std::chrono::seconds(20));  // then the store ends
    if (launch_info().mpi) mpi_finish();
  } catch (const std::exception& error) {
    leave_without_store(error.what());
  }
}

void end_all_ranks(const std::string& text) {
  if (job == nullptr) return;
  {
    const std::lock_guard lock(job->mutex);
    if (job->failure.empty()) job->failure = text;
  }
  job->changed.notify_all();
  sleep_seconds(2 * job->heartbeat_s + 5);  // the heartbeat ends the process, unless it is stuck
  leave_without_store(text);
}

void set_comm_context(std::string context) {
  if (job == nullptr) return;
  const std::lock_guard lock(job->mutex);
  job->context = std::move(context);
}

std::string comm_context() {
  if (job == nullptr) return "";
  const std::lock_guard lock(job->mutex);
  return job->context;
}

void note_operation(const std::string& what) {
  const std::lock_guard lock(job->mutex);
  job->last_operation = what;
}

double comm_timeout_s() {
  static const double timeout = number_in("PITH_COMM_TIMEOUT_S", 600.0);
  return timeout;
}

uint64_t watch(std::string what, double limit_s, std::function<bool()> done) {
  const std::lock_guard lock(job->mutex);
  job->watches.emplace(job->next_watch, Watch{std::move(what), limit_s, 0, std::move(done)});
  return job->next_watch++;
}

void unwatch(uint64_t id) {
  const std::lock_guard lock(job->mutex);
  job->watches.erase(id);
}

void store_set(const std::string& key, const std::string& value) {
  with_store([&] { job->store->set(job->key(key), value); });
}

std::vector<std::string> store_get(const std::vector<std::string>& keys) {
  std::vector<std::string> full, result;
  for (const std::string& key : keys) full.push_back(job->key(key));
  with_store([&] {
    for (const std::vector<uint8_t>& value : job->store->multiGet(full))
      result.emplace_back(value.begin(), value.end());
  });
  return result;
}

void store_delete(const std::string& key) {
  with_store([&] { job->store->deleteKey(job->key(key)); });
}

}  // namespace pith
