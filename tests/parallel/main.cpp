// Runs under mpirun: every rank runs the same tests in the same order. Rank 0 reports; the others
// print their failures only. With PITH_TEST_FAILURE the program is a job that fails instead; see
// tests/integration/parallel_failures.sh. With PITH_TEST_SAVE_AGAIN it does what reshard.cpp says.
#include <unistd.h>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <thread>
#include "core/device.h"
#include "tests/parallel/world.h"

namespace {
const pith::World* the_world = nullptr;
at::Device the_device = at::kCPU;

class FailuresOnly : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", static_cast<int>(the_world->rank()),
      result.file_name() ? result.file_name() : "?", result.line_number(), result.message());
  }
};

volatile std::sig_atomic_t stop = 0;

// Steps with a collective each, for 100 s, until something happens to a rank.
void fail_somehow(const std::string& how) {
  const pith::Comm all = the_world->all();
  const bool last = all.rank() == all.size() - 1;
  std::printf("rank %d pid %d\n", static_cast<int>(all.rank()), static_cast<int>(getpid()));
  std::fflush(stdout);
  check_same_everywhere(all, {{"configuration", how == "differ" && last ? "lr = 2" : "lr = 1"}});
  std::signal(SIGUSR1, [](int) { stop = 1; });
  for (int step = 1; step < 2000; ++step) {
    pith::set_comm_context(fmt::format("step {}", step));
    if (how == "throw" && last && step == 20) PITH_FAIL("no row 7 in the corpus");
    if (how == "absent" && last && step == 20)
      std::this_thread::sleep_for(std::chrono::seconds(100));
    if (how == "end" && step == 20) return;
    if (pith::launch_info().mpi) {
      pith::Tensor x = at::full({1}, stop, at::kInt);
      all.all_reduce(x);
      if (x.item<int>() != 0) { // a rank was asked to stop: all end after the same step
        std::this_thread::sleep_for(std::chrono::seconds(2));
        std::printf("saved after step %d\n", step);
        return;
      }
    } else {
      all.barrier();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

} // namespace

const pith::World& pith::test::world() { return *the_world; }
at::Device pith::test::device() { return the_device; }
namespace pith::test {
void save_again(const std::string& what);
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (pith::launch_info().rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly);
    testing::GTEST_FLAG(output) = "";
  }
  try {
    const char* device = std::getenv("PITH_TEST_DEVICE");
    the_device = pith::select_device(device ? device : "cpu");
    const pith::World world;
    the_world = &world;
    if (const char* how = std::getenv("PITH_TEST_FAILURE")) {
      fail_somehow(how);
      return 0;
    }
    if (const char* what = std::getenv("PITH_TEST_SAVE_AGAIN")) {
      pith::test::save_again(what);
      return 0;
    }
    return RUN_ALL_TESTS();
  } catch (const pith::Error& error) {
    pith::end_all_ranks(error.what());
    return 1;
  }
}
