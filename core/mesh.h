// The one authority on parallel dimensions: world = PP x DP x CP, experts folded into DP x CP.
#pragma once
#include "core/comm.h"

namespace pith {

// What the user chooses; DP follows from the number of processes. hsdp: parameters are sharded
// within blocks of hsdp_size consecutive ranks of the plane and replicated across the blocks.
struct MeshShape {
  int64_t pp = 1, cp = 1, ep = 1;
  bool hsdp = false;
  int64_t hsdp_size = 0;  // a multiple of ep that divides DP x CP
  // Share of each micro-batch's tokens whose head the second stage computes: it evens out a head
  // that weighs no whole number of layers.
  double head_share = 0;
};

// Where one rank stands. World rank = (pp * DP + dp) * CP + cp: stages outermost, CP innermost.
// The plane is the DP x CP ranks of one stage, plane rank = dp * CP + cp; EP groups are EP
// consecutive ranks of it. The first stage holds embedding and head (DualPipeV).
struct MeshPlace {
  int64_t pp, dp, cp, ep;
};

// The groups of one rank as world ranks, this rank among them.
struct MeshGroups {
  std::vector<int64_t> pipeline, plane, context, expert, expert_data, dense_shard, head_shard,
      expert_shard, replicate;
};

// DP for this many processes. Throws for an impossible layout, naming the nearest possible ones.
int64_t data_parallel(const MeshShape& shape, int64_t world);
MeshPlace mesh_place(const MeshShape& shape, int64_t world, int64_t rank);
MeshGroups mesh_groups(const MeshShape& shape, int64_t world, int64_t rank);
// A table: one line a rank, for any number of processes.
std::string mesh_table(const MeshShape& shape, int64_t world);

// Sizes, this process's place and its groups; default: one process. Groups are set up at their
// first collective, so those that a layout does not use cost nothing. Of world, plane and the last
// five those that have the same members are one.
struct Mesh {
  MeshShape shape;
  int64_t dp = 1;
  MeshPlace place{0, 0, 0, 0};
  Comm world;     // all processes
  Comm pipeline;  // PP: the same place of the plane in every stage, in their order
  // Groups of two each, for transfers that never wait for each other (engine/pipeline.cpp).
  std::array<Comm, 6> previous, next;
  Comm plane;         // DP x CP of this stage: losses and dense gradients are summed over it
  Comm context;       // CP: shares its sequences
  Comm expert;        // EP: divides the experts among its members
  Comm dense_shard;   // dense parameters are sharded over this: the plane, or a block of it
  Comm head_shard;    // head: the same, of both stages that share it
  Comm expert_shard;  // experts: members of MeshGroups::expert_data, which hold the same ones
  Comm dense_replicate, expert_replicate;  // hold the same shard; one group, as ep divides blocks
  at::Device device = at::kCPU;
};

// Collective over the world.
Mesh make_mesh(const MeshShape& shape, const World& world, at::Device device);

}
