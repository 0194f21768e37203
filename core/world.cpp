// The job: how its processes started, their store, and the two threads that end all when one is
// lost. The heartbeat talks to the store and looks after collectives; the guard only looks at the
// heartbeat, so that a hanging store cannot stop it.
#include <c10/util/Exception.h>
#include <c10/util/Flags.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include "core/transport.h"

C10_DECLARE_int(caffe2_log_level);

namespace pith {
namespace {
string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

template <class Number> Number number_in(const char* name, Number fallback) {
  const string text = environment(name);
  if (text.empty()) return fallback;
  Number value{};
  const auto end = from_chars(text.data(), text.data() + text.size(), value);
  PITH_CHECK(end.ec == std::errc() && end.ptr == text.data() + text.size() && value >= 0,
    "environment variable {}='{}' is not a number", name, text);
  return value;
}

Launch read_launch() {
  const auto is_set = [](const char* name) { return !environment(name).empty(); };
  const auto read = [](const char* rank, const char* size, const char* local, bool mpi) {
    const Launch launch{
      number_in<int64_t>(rank, 0), number_in<int64_t>(size, 1), number_in<int64_t>(local, 0), mpi};
    PITH_CHECK(launch.rank < launch.size, "rank {} of {} processes", launch.rank, launch.size);
    return launch.size > 1 ? launch : Launch{};
  };
  if (is_set("OMPI_COMM_WORLD_SIZE"))
    return read("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", true);
  if (is_set("RANK") && is_set("WORLD_SIZE")) { // torchrun
    const Launch launch = read("RANK", "WORLD_SIZE", "LOCAL_RANK", false);
    PITH_CHECK(launch.size == 1 || (is_set("MASTER_ADDR") && is_set("MASTER_PORT")),
      "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT");
    return launch;
  }
  const Launch launch = read("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", true); // srun
  if (launch.size > 1 && !is_set("PMIX_RANK"))
    PITH_FAIL_HINT("use srun --mpi=pmix", "srun started {} tasks that cannot meet", launch.size);
  return launch;
}

struct Watch {
  string what;
  double limit_s;
  function<bool()> done;
  double age_s = 0;
};

// Of a job of several processes. Leaked: its threads may outlive main's unwinding. Ages are in
// ticks, not of a clock: no jump when the job is stopped and continued (closed lid, SIGSTOP).
struct Job {
  int64_t rank = launch_info().rank, size = launch_info().size;
  double heartbeat_s = number_in("PITH_HEARTBEAT_S", 20.0);
  double tick_s = min(heartbeat_s, comm_timeout_s()) / 10;
  c10::intrusive_ptr<c10d::Store> store, beats; // main thread's, heartbeat's
  thread heartbeat, guard;

  std::mutex mutex; // guards what follows
  std::condition_variable changed;
  bool stopping = false;
  string failure; // of this rank, on its way to the store
  double since_heartbeat_s = 0; // as the guard counts it
  string context, last_operation = "start";
  vector<Watch> watches;

  vector<string> keys(const string& name) const { // of all ranks
    vector<string> result;
    for (int64_t i = 0; i < size; ++i) result.push_back(fmt::format("{}/{}", name, i));
    return result;
  }
};

Job* job = nullptr;

constexpr const char* kStoreLost =
  "rank 0 has ended or lost its connection: its store does not answer";

chrono::duration<double> seconds(double count) { return chrono::duration<double>(count); }

void print_failure(const string& text) {
  const string line = fmt::format("FAILED rank {}: {}\n", job->rank, text);
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
}

// Without rank 0's store the lowest rank left speaks; the launcher ends the others meanwhile.
[[noreturn]] void leave_without_store(const string& text) {
  std::this_thread::sleep_for(
    chrono::milliseconds(500 * std::clamp<int64_t>(job->rank - 1, 0, 10)));
  print_failure(text);
  _exit(1);
}

// Who failed first has said it. Rank 0 stays until the others have read it.
[[noreturn]] void leave_quietly() {
  if (job->rank == 0) std::this_thread::sleep_for(seconds(2.5 * job->tick_s));
  _exit(1);
}

void write_beat(int64_t beat) {
  std::unique_lock lock(job->mutex);
  const string text = fmt::format("{}{} (beat {})", job->last_operation, job->context, beat);
  lock.unlock();
  job->beats->set(fmt::format("beat/{}", job->rank), text);
}

// `text` becomes the first cause if there is none yet; ends this process.
[[noreturn]] void fail_through_store(string text) {
  if (text.starts_with("timeout")) {
    const vector<string> keys = job->keys("beat");
    for (size_t rank = 0; rank < min<size_t>(keys.size(), 64); ++rank)
      text +=
        fmt::format("\n  rank {} was last seen at: {}", rank, job->beats->get_to_str(keys[rank]));
  }
  const string mine = fmt::format("{}|{}", job->rank, text);
  if (job->beats->compareSet("failure", string(), mine) == mine) print_failure(text);
  leave_quietly();
}

// One tick of age; what has failed or is late, or "".
string failed_operation(vector<Watch>& watches) {
  string text;
  try {
    std::erase_if(watches, [&](Watch& it) {
      if (it.done()) return true;
      it.age_s += job->tick_s;
      if (it.age_s > it.limit_s && text.empty())
        text = fmt::format("timeout: {} has not finished after {:.0f} s", it.what, it.limit_s);
      return false;
    });
  } catch (const Error& error) { text = error.what(); }
  return text;
}

void run_heartbeat() {
  vector<string> others = job->keys("beat"); // rank 0 looks at all, the others at it
  if (job->rank != 0) others.resize(1);
  vector<string> seen(others.size());
  vector<double> ages_s(others.size());
  vector<Watch> watches;
  for (int64_t beat = 1;; ++beat) {
    string failure;
    {
      std::unique_lock lock(job->mutex);
      job->since_heartbeat_s = 0;
      job->changed.wait_for(
        lock, seconds(job->tick_s), [] { return job->stopping || !job->failure.empty(); });
      if (job->stopping) return;
      failure = job->failure;
      watches.swap(job->watches);
    }
    // Not under the lock: CUDA may answer late or never, and then the guard has to speak.
    if (failure.empty()) failure = failed_operation(watches);
    {
      const lock_guard lock(job->mutex);
      if (job->failure.empty()) job->failure = failure;
      ranges::move(watches, std::back_inserter(job->watches));
      watches.clear();
    }
    try {
      if (!failure.empty()) fail_through_store(failure);
      write_beat(beat);
      if (job->beats->check({"failure"})) leave_quietly();
      for (size_t rank = 0; rank < others.size(); ++rank) {
        if (int64_t(rank) == job->rank) continue;
        const string now = job->beats->get_to_str(others[rank]);
        ages_s[rank] = now == seen[rank] ? ages_s[rank] + job->tick_s : 0;
        seen[rank] = now;
        if (ages_s[rank] <= job->heartbeat_s) continue;
        fail_through_store(
          fmt::format("rank {} has given no sign of life for {:.0f} s (stopped, killed or its "
                      "machine lost); it was last seen at: {}",
            rank, job->heartbeat_s, now));
      }
    } catch (const exception&) { leave_without_store(failure.empty() ? kStoreLost : failure); }
  }
}

void run_guard() {
  std::unique_lock lock(job->mutex);
  while (!job->changed.wait_for(lock, seconds(job->tick_s), [] { return job->stopping; })) {
    job->since_heartbeat_s += job->tick_s;
    if (job->since_heartbeat_s <= job->heartbeat_s + 2 * job->tick_s) continue;
    string failure = job->failure, last = job->last_operation;
    lock.unlock();
    if (failure.empty())
      failure = fmt::format(
        "rank 0 has not answered for {:.0f} s, or else this rank's device (stopped, or its "
        "machine lost); last operation: {}",
        job->heartbeat_s, last);
    leave_without_store(failure);
  }
}

string host_name() {
  array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

c10::intrusive_ptr<c10d::Store> open_store() {
  FLAGS_caffe2_log_level = 2; // C10d's own reports of lost connections would repeat ours.
  c10d::TCPStoreOptions options;
  options.isServer = job->rank == 0;
  options.waitWorkers = false;
  options.timeout = chrono::minutes(5);
  if (!launch_info().mpi) {
    options.port = narrow<uint16_t>(number_in<int64_t>("MASTER_PORT", 0));
    // torchrun's agent already serves a store here, also for earlier attempts.
    if (environment("TORCHELASTIC_USE_AGENT_STORE") == "True") options.isServer = false;
    return c10::make_intrusive<c10d::PrefixStore>(
      "pith" + environment("TORCHELASTIC_RESTART_COUNT"),
      c10::make_intrusive<c10d::TCPStore>(environment("MASTER_ADDR"), options));
  }
  options.port = 0;
  c10::intrusive_ptr<c10d::TCPStore> server;
  if (job->rank == 0) server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const string address =
    mpi_broadcast_text(server ? fmt::format("{} {}", server->getPort(), host_name()) : "");
  if (server) return server;
  const string host = address.substr(address.find(' ') + 1);
  options.port = narrow<uint16_t>(std::stoi(address));
  return c10::make_intrusive<c10d::TCPStore>(host == host_name() ? "127.0.0.1" : host, options);
}
}

const Launch& launch_info() {
  static const Launch launch = read_launch();
  return launch;
}

World::World() {
  if (launch_info().size == 1) return;
  // A kernel's first load waits for all that runs, also a transfer that waits for this kernel.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  job = new Job;
  set_error_context(fmt::format("rank {}", job->rank));
  if (launch_info().mpi) mpi_start();
  job->store = open_store();
  job->beats = job->store->clone();
  // As long as a checkpoint of another rank; heartbeat and guard end waits.
  job->store->setTimeout(chrono::hours(24 * 365));
  write_beat(0);
  store_gather("here", 0, job->rank, job->size, ""); // every beat stands before anyone reads it
  job->heartbeat = thread(run_heartbeat);
  job->guard = thread(run_guard);
}

World::~World() {
  if (job == nullptr || std::uncaught_exceptions() > 0) return;
  try {
    note_operation("the end");
    store_gather("bye", 0, job->rank, job->size, ""); // the heartbeat goes on
    {
      const lock_guard lock(job->mutex);
      job->stopping = true;
    }
    job->changed.notify_all();
    job->heartbeat.join();
    job->guard.join();
    const vector<string> gone = job->keys("gone");
    job->store->set(gone[index(job->rank)], string());
    if (job->rank == 0) job->store->wait(gone, chrono::seconds(20)); // then the store ends
    if (launch_info().mpi) mpi_finish();
  } catch (const exception& error) { leave_without_store(error.what()); }
}

void end_all_ranks(const string& text) {
  if (job == nullptr) return;
  if (!job->heartbeat.joinable()) leave_without_store(text); // it did not start
  {
    const lock_guard lock(job->mutex);
    if (job->failure.empty()) job->failure = text;
  }
  job->changed.notify_all();
  for (;;) pause(); // the heartbeat ends the process or, if it is stuck, the guard
}

void set_comm_context(const string& context) {
  if (job == nullptr) return;
  const lock_guard lock(job->mutex);
  job->context = context.empty() ? "" : ", " + context;
}

string comm_context() {
  if (job == nullptr) return "";
  const lock_guard lock(job->mutex);
  return job->context;
}

void note_operation(const string& what) {
  const lock_guard lock(job->mutex);
  job->last_operation = what;
}

double comm_timeout_s() {
  static const double timeout = number_in("PITH_COMM_TIMEOUT_S", 600.0);
  return timeout;
}

void watch(string what, double limit_s, function<bool()> done) {
  const lock_guard lock(job->mutex);
  job->watches.push_back({std::move(what), limit_s, std::move(done)});
}

shared_ptr<void> watch(string what, double limit_s) {
  const auto call = make_shared<char>();
  watch(std::move(what), limit_s, [alive = std::weak_ptr(call)] { return alive.expired(); });
  return call;
}

vector<string> store_gather(
  const string& place, int64_t round, int64_t rank, int64_t size, const string& mine) {
  const auto key = [&](int64_t of_round, int64_t member) {
    return fmt::format("{}/{}/{}", place, of_round, member);
  };
  vector<string> keys, result;
  for (int64_t member = 0; member < size; ++member) keys.push_back(key(round, member));
  try {
    job->store->set(key(round, rank), mine);
    for (const auto& value: job->store->multiGet(keys))
      result.emplace_back(value.begin(), value.end());
    // All members are in this round: they have read the one before.
    if (round > 0) job->store->deleteKey(key(round - 1, rank));
  } catch (const c10::Error&) { end_all_ranks(kStoreLost); }
  return result;
}
}
