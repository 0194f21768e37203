#include "engine/schedule.h"
#include <gtest/gtest.h>
#include <map>
#include <numeric>
#include "core/error.h"

namespace pith {
namespace {
std::vector<StageCosts> equal_costs(int64_t ranks, double hidden) {
  return std::vector<StageCosts>(static_cast<size_t>(2 * ranks), StageCosts{1, 1, 1, hidden});
}

TEST(Schedule, BubbleIsThePublishedOne) {
  for (const int64_t ranks: {1, 2, 3, 4, 8}) {
    for (const int64_t n: {2 * ranks, 2 * ranks + 3, 4 * ranks}) {
      for (const double hidden: {0.0, 0.5, 1.0}) {
        const Simulation s = simulate(ranks, n, true, equal_costs(ranks, hidden));
        const double backward = 2, both = 3 - hidden;
        EXPECT_DOUBLE_EQ(s.bubble.back(), static_cast<double>(ranks - 1) * (both + backward - 3))
          << ranks << " ranks, " << n << " micro-batches, hidden " << hidden;
        for (const int64_t peak: s.peak_activations) EXPECT_EQ(peak, 2 * ranks + 1);
      }
    }
  }
}

// Every (chunk, micro-batch) once forward and once backward, in order, each weight gradient that
// was put off done once and after its backward.
TEST(Schedule, EveryMicroBatchOnce) {
  for (const int64_t ranks: {1, 2, 4, 5}) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t n = 2 * ranks + 1;
      std::map<int, int64_t> forwards, backwards;
      std::map<std::pair<int, int64_t>, int> put_off;
      const auto backward = [&](int chunk, int64_t microbatch) {
        EXPECT_EQ(backwards[chunk]++, microbatch);
        EXPECT_LT(microbatch, forwards[chunk]);
      };
      for (const Action& a: make_schedule(ranks, rank, n, true)) {
        // Of a forward against a backward, the backward is of an earlier micro-batch.
        for (auto pass = a.rbegin(); pass != a.rend(); ++pass) {
          switch (pass->kind) {
            case Pass::forward: EXPECT_EQ(forwards[pass->chunk]++, pass->microbatch); break;
            case Pass::backward_input:
              put_off[{pass->chunk, pass->microbatch}] = 1;
              [[fallthrough]];
            case Pass::backward: backward(pass->chunk, pass->microbatch); break;
            case Pass::weight: EXPECT_EQ((put_off[{pass->chunk, pass->microbatch}]--), 1); break;
            case Pass::head: FAIL();
          }
        }
        const bool pair =
          a.size() == 2 && a[0].kind == Pass::forward && a[1].kind == Pass::backward;
        EXPECT_TRUE(a.size() == 1 || pair);
      }
      for (const int chunk: {0, 1}) {
        EXPECT_EQ(forwards[chunk], n);
        EXPECT_EQ(backwards[chunk], n);
      }
      for (const auto& [key, open]: put_off) EXPECT_EQ(open, 0);
    }
  }
}

TEST(Schedule, TooFewMicroBatchesAreRefused) {
  try {
    make_schedule(4, 0, 7, true);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("at least 8 micro-batches"), std::string::npos);
  }
  EXPECT_EQ(to_string(make_schedule(1, 0, 1, true)), "F0:0 F1:0 B1:0 I0:0 W0:0");
  EXPECT_EQ(to_string(make_schedule(1, 0, 2, false)), "F0:0 F1:0 B1:0 B0:0 F0:1 F1:1 B1:1 B0:1");
}

TEST(Schedule, ChunksAreBalancedByCost) {
  const auto even = balance_chunks(2, 8, {});
  EXPECT_EQ(even, (std::vector<int64_t>{2, 2, 2, 2}));
  // A head as heavy as several layers: rank 0 holds fewer of them.
  const auto uneven = balance_chunks(2, 8, {9, 0});
  EXPECT_EQ(std::accumulate(uneven.begin(), uneven.end(), int64_t{0}), 8);
  EXPECT_LT(uneven.front() + uneven.back(), uneven[1] + uneven[2]);
  // Fewer layers than chunks: some chunks are empty.
  const auto few = balance_chunks(4, 3, {1.5, 0});
  EXPECT_EQ(std::accumulate(few.begin(), few.end(), int64_t{0}), 3);
}

// Rank 1's share of a head that weighs three layers of eight: the last chunk does not wait for it.
TEST(Schedule, SharedHead) {
  for (const int64_t ranks: {2, 3, 4, 8}) {
    for (const int64_t n: {2 * ranks, 2 * ranks + 3, 4 * ranks}) {
      std::vector<int64_t> heads;
      std::map<int64_t, int64_t> leads_there;
      for (const Action& a: make_schedule(ranks, 1, n, true, true)) {
        for (const Pass& pass: a) {
          if (pass.kind == Pass::head) heads.push_back(pass.microbatch);
          if (pass.kind == Pass::forward && pass.chunk == 1)
            leads_there[pass.microbatch] = std::ssize(heads);
        }
      }
      EXPECT_EQ(std::ssize(heads), n);
      for (int64_t m = 0; m < n; ++m) {
        EXPECT_EQ(heads[static_cast<size_t>(m)], m);
        EXPECT_LE(leads_there[m], m);
      }
      EXPECT_NO_THROW(simulate(ranks, n, true, equal_costs(ranks, 0), {2, 0.3}));
    }
  }
  const auto step = [&](double share) {
    const HeadCosts head{9, share};
    std::vector<StageCosts> costs;
    for (const int64_t count: balance_chunks(2, 8, head)) {
      const auto layer = static_cast<double>(count);
      costs.push_back({layer, layer, layer, 0});
    }
    return simulate(2, 16, true, costs, head).makespan;
  };
  const double ideal = 16 * (3 * 8 + 9) / 2.0;
  EXPECT_GT(step(0), 1.08 * ideal);
  EXPECT_LT(step(0.15), 1.05 * ideal);
}

TEST(Schedule, Drawing) {
  const Simulation s = simulate(2, 4, true, equal_costs(2, 0.5));
  const std::string svg = draw_svg(s);
  std::ptrdiff_t passes = 0, drawn = 0;
  for (const auto& actions: s.actions)
    for (const Action& action: actions) passes += std::ssize(action);
  for (size_t at = 0; (at = svg.find("<rect", at)) != svg.npos; ++at) ++drawn;
  EXPECT_EQ(drawn, passes);
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
}

} // namespace
} // namespace pith
