// The one authority on parallel dimensions: world = PP x DP x CP, experts folded into DP x CP.
#pragma once
#include "core/comm.h"

namespace pith {
// What the user chooses; DP follows. hsdp: parameters are sharded within blocks of hsdp_size
// consecutive ranks of the plane and replicated across the blocks.
struct MeshShape {
  int64_t pp = 1, cp = 1, ep = 1;
  bool hsdp = false;
  int64_t hsdp_size = 0; // a multiple of ep that divides DP x CP
  // Share of a micro-batch's tokens whose head the second stage computes, to even out stages.
  double head_share = 0;
};

// World rank = (pp * DP + dp) * CP + cp. The plane is the DP x CP ranks of one stage, plane rank =
// dp * CP + cp; EP groups: EP consecutive ranks of it. Stage 0 has embedding and head (DualPipeV).
struct MeshPlace {
  int64_t pp, dp, cp, ep;
};

// World ranks of one rank's groups, itself among them.
struct MeshGroups {
  vector<int64_t> pipeline, plane, context, expert, expert_data, dense_shard, head_shard,
    expert_shard, replicate;
};

// DP for this many processes. Throws for an impossible layout, naming the nearest ones.
int64_t data_parallel(const MeshShape& shape, int64_t world);
MeshPlace mesh_place(const MeshShape& shape, int64_t world, int64_t rank);
MeshGroups mesh_groups(const MeshShape& shape, int64_t world, int64_t rank);
string mesh_table(const MeshShape& shape, int64_t world); // a table, one line a rank

// Sizes, place, groups; default: one process. Groups are set up at their first collective: unused
// ones cost nothing. Of world, plane and the last five those of the same members are one.
struct Mesh {
  MeshShape shape;
  int64_t dp = 1;
  MeshPlace place{0, 0, 0, 0};
  Comm world;
  Comm pipeline; // PP: the same place in every stage's plane, in order
  // Of two each: transfers that never wait for each other (engine/pipeline.cpp).
  array<Comm, 6> previous, next;
  Comm plane; // DP x CP of this stage: sums losses and dense gradients
  Comm context; // CP: shares its sequences
  Comm expert; // EP: divides the experts
  Comm dense_shard; // dense parameters are sharded over this: the plane or a block
  Comm head_shard; // head: the same, of both stages that share it
  Comm expert_shard; // experts: MeshGroups::expert_data, the holders of the same ones
  Comm dense_replicate, expert_replicate; // of the same shard; one group: ep divides blocks
  Device device = kCPU;
};

// Collective over the world.
Mesh make_mesh(const MeshShape& shape, const World& world, Device device);
}
