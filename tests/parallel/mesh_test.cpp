// Who is where in every small layout, and the groups of this run's own processes.
#include "core/mesh.h"
#include <numeric>
#include <set>
#include "tests/parallel/world.h"

namespace pith::test {
namespace {
using Ranks = std::vector<int64_t>;

// Every kind of group cuts the world into parts that its members agree on.
void expect_partition(
  const MeshShape& shape, int64_t world_size, Ranks MeshGroups::* kind, size_t members) {
  std::set<int64_t> covered;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const Ranks group = mesh_groups(shape, world_size, rank).*kind;
    EXPECT_EQ(group.size(), members);
    EXPECT_TRUE(std::ranges::is_sorted(group));
    EXPECT_TRUE(std::ranges::binary_search(group, rank));
    for (const int64_t member: group)
      EXPECT_EQ(mesh_groups(shape, world_size, member).*kind, group);
    covered.insert(group.begin(), group.end());
  }
  EXPECT_EQ(std::ssize(covered), world_size);
}

TEST(Mesh, EveryLayoutOfUpToEightRanks) {
  int layouts = 0;
  for (const int64_t pp: {1, 2, 4}) {
    for (const int64_t dp: {1, 2, 4, 3}) {
      for (const int64_t cp: {1, 2, 4}) {
        for (const int64_t ep: {1, 2, 3, 4, 8}) {
          const int64_t world_size = pp * dp * cp, plane = dp * cp;
          if (world_size > 12 || plane % ep != 0) continue;
          SCOPED_TRACE(fmt::format("pp {} dp {} cp {} ep {}", pp, dp, cp, ep));
          for (int64_t block = 0; block <= plane; block += ep) { // 0: fsdp
            if (block > 0 && plane % block != 0) continue;
            ++layouts;
            const MeshShape shape{pp, cp, ep, block > 0, block};
            const auto whole = static_cast<size_t>(block > 0 ? block : plane);
            const auto n = [](int64_t size) { return static_cast<size_t>(size); };
            EXPECT_EQ(data_parallel(shape, world_size), dp);
            expect_partition(shape, world_size, &MeshGroups::pipeline, n(pp));
            expect_partition(shape, world_size, &MeshGroups::plane, n(plane));
            expect_partition(shape, world_size, &MeshGroups::context, n(cp));
            expect_partition(shape, world_size, &MeshGroups::expert, n(ep));
            expect_partition(shape, world_size, &MeshGroups::expert_data, n(plane / ep));
            expect_partition(shape, world_size, &MeshGroups::dense_shard, whole);
            expect_partition(shape, world_size, &MeshGroups::expert_shard, whole / n(ep));
            expect_partition(shape, world_size, &MeshGroups::replicate, n(plane) / whole);
            for (int64_t rank = 0; rank < world_size; ++rank) {
              const MeshPlace place = mesh_place(shape, world_size, rank);
              EXPECT_EQ((place.pp * dp + place.dp) * cp + place.cp, rank);
              const MeshGroups groups = mesh_groups(shape, world_size, rank);
              // Shards and replicas together are all that hold the same; they share one rank.
              for (const int64_t other: groups.expert_data)
                EXPECT_EQ(mesh_place(shape, world_size, other).ep, place.ep);
              EXPECT_EQ(
                groups.expert_shard.size() * groups.replicate.size(), groups.expert_data.size());
              EXPECT_EQ(groups.expert[static_cast<size_t>(place.ep)], rank);
              EXPECT_EQ(groups.pipeline[static_cast<size_t>(place.pp)], rank);
              EXPECT_EQ(groups.context[static_cast<size_t>(place.cp)], rank);
            }
          }
        }
      }
    }
  }
  EXPECT_GT(layouts, 50);
}

TEST(Mesh, OneLayoutByHand) {
  const MeshShape shape{.pp = 2, .cp = 2, .ep = 2, .hsdp = true, .hsdp_size = 2}; // dp 2, world 8
  const MeshGroups groups = mesh_groups(shape, 8, 6); // second stage, dp 1, cp 0
  EXPECT_EQ(groups.pipeline, (Ranks{2, 6}));
  EXPECT_EQ(groups.plane, (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(groups.context, (Ranks{6, 7}));
  EXPECT_EQ(groups.expert, (Ranks{6, 7}));
  EXPECT_EQ(groups.expert_data, (Ranks{4, 6}));
  EXPECT_EQ(groups.dense_shard, (Ranks{6, 7}));
  EXPECT_EQ(groups.head_shard, groups.dense_shard);
  EXPECT_EQ(groups.expert_shard, (Ranks{6}));
  EXPECT_EQ(groups.replicate, (Ranks{4, 6}));
  MeshShape shared = shape;
  shared.head_share = 0.25;
  EXPECT_EQ(mesh_groups(shared, 8, 6).head_shard, (Ranks{2, 3, 6, 7}));
  EXPECT_EQ(mesh_groups(shared, 8, 1).head_shard, (Ranks{0, 1, 4, 5}));
  shared.pp = 4, shared.cp = 1; // dp 2
  EXPECT_EQ(mesh_groups(shared, 8, 3).head_shard, (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(mesh_groups(shared, 8, 5).head_shard, (Ranks{4, 5}));
}

// CP 8 with EP 8 needs 8 ranks.
TEST(Mesh, ExpertsAreFoldedIntoThePlane) {
  const MeshShape shape{.cp = 8, .ep = 8};
  EXPECT_EQ(data_parallel(shape, 8), 1);
  EXPECT_EQ(mesh_groups(shape, 8, 3).expert.size(), 8U);
}

TEST(Mesh, ImpossibleLayoutsNameTheNearest) {
  const std::string text = error_text([] { data_parallel({.pp = 3}, 8); });
  EXPECT_PRED2(contains, text, "8 processes cannot be laid out as pp 3 cp 1 ep 1");
  EXPECT_PRED2(contains, text, "nearest possible layouts: pp 4 dp 2 cp 1 ep 1");
  EXPECT_PRED2(contains, error_text([] { data_parallel({.pp = 4, .ep = 4}, 8); }),
    "ep 4 does not divide the plane of DP x CP = 2 ranks");
  EXPECT_PRED2(contains,
    error_text([] { data_parallel({.ep = 4, .hsdp = true, .hsdp_size = 2}, 8); }),
    "ep 4 hsdp_size 4");
  for (const MeshShape& shape: {MeshShape{.head_share = 0.5}, {.pp = 2, .head_share = 1.0}})
    EXPECT_PRED2(
      contains, error_text([&] { data_parallel(shape, 8); }), "needs two stages, and lies below 1");
}

TEST(Mesh, TableShowsEveryRank) {
  const std::string table = mesh_table({.pp = 2, .cp = 2, .ep = 2}, 8);
  EXPECT_EQ(std::ranges::count(table, '\n'), 10);
  EXPECT_PRED2(contains, table, "8 processes: pp 2 dp 2 cp 2 ep 2");
  EXPECT_PRED2(contains, table, "    6    1    1    0    0  6..7             4..6 by 2");
}

TEST(Mesh, GroupsOfThisRunSumTheirMembers) {
  for (const MeshShape& shape: {MeshShape{.ep = 2}, MeshShape{.cp = 2}, MeshShape{.pp = 2}}) {
    const Mesh mesh = make_mesh(shape, world(), device());
    const Comm* comms[] = {&mesh.world, &mesh.pipeline, &mesh.plane, &mesh.context, &mesh.expert,
      &mesh.dense_shard, &mesh.dense_replicate, &mesh.expert_shard, &mesh.expert_replicate};
    for (const Comm* comm: comms) {
      Tensor sum = full({1}, static_cast<double>(world().rank()), at::kLong);
      comm->all_reduce(sum);
      EXPECT_EQ(sum.item<int64_t>(), std::reduce(comm->ranks().begin(), comm->ranks().end()))
        << comm->name();
    }
  }
}

TEST(Mesh, DefaultIsOneProcess) {
  const Mesh mesh;
  EXPECT_EQ(mesh.world.size(), 1);
  EXPECT_EQ(mesh.expert.rank(), 0);
}

} // namespace
} // namespace pith::test
