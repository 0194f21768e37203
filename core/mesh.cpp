#include "core/mesh.h"

namespace pith {
namespace {
// Empty, or what is wrong.
string problem(const MeshShape& shape, int64_t world) {
  const auto& [pp, cp, ep, hsdp, block, head_share] = shape;
  if (pp < 1 || cp < 1 || ep < 1) return "sizes must be at least 1";
  if (world % (pp * cp) != 0)
    return fmt::format("pp x cp = {} x {} does not divide {} processes", pp, cp, world);
  const int64_t plane = world / pp;
  if (plane % ep != 0)
    return fmt::format("ep {} does not divide the plane of DP x CP = {} ranks", ep, plane);
  if (hsdp && (block < 1 || block % ep != 0 || plane % block != 0))
    return fmt::format(
      "hsdp_size {} must be a multiple of ep {} and divide DP x CP = {}", block, ep, plane);
  if (head_share < 0 || head_share >= 1 || (head_share > 0 && pp == 1))
    return fmt::format("head_share {} needs two stages, and lies below 1", head_share);
  return "";
}

string to_text(const MeshShape& shape, int64_t world) {
  return fmt::format("pp {} dp {} cp {} ep {}{}", shape.pp, world / (shape.pp * shape.cp), shape.cp,
    shape.ep, shape.hsdp ? fmt::format(" hsdp_size {}", shape.hsdp_size) : "");
}

// The possible layouts that change the chosen sizes least, counted in factors.
string nearest(const MeshShape& wanted, int64_t world) {
  vector<int64_t> sizes;
  for (int64_t size = 1; size <= world; ++size)
    if (world % size == 0) sizes.push_back(size);
  const auto factor = [](int64_t a, int64_t b) {
    return std::abs(std::log2(real(max<int64_t>(a, 1)) / real(max<int64_t>(b, 1))));
  };
  vector<pair<double, string>> found;
  for (const int64_t pp: sizes)
    for (const int64_t cp: sizes)
      for (const int64_t ep: sizes)
        for (const int64_t block: wanted.hsdp ? sizes : vector<int64_t>{0}) {
          const MeshShape shape{pp, cp, ep, wanted.hsdp, block};
          if (!problem(shape, world).empty()) continue;
          found.emplace_back(factor(pp, wanted.pp) + factor(cp, wanted.cp) + factor(ep, wanted.ep) +
              factor(block, wanted.hsdp_size),
            to_text(shape, world));
        }
  ranges::sort(found);
  found.resize(min<size_t>(found.size(), 3));
  return fmt::format("nearest possible layouts: {}", fmt::join(found | std::views::values, "; "));
}
}

int64_t data_parallel(const MeshShape& shape, int64_t world) {
  if (const string text = problem(shape, world); !text.empty())
    PITH_FAIL_HINT(nearest(shape, world),
      "{} processes cannot be laid out as pp {} cp {} ep {}: {}", world, shape.pp, shape.cp,
      shape.ep, text);
  return world / (shape.pp * shape.cp);
}

MeshPlace mesh_place(const MeshShape& shape, int64_t world, int64_t rank) {
  const int64_t dp = data_parallel(shape, world), plane = dp * shape.cp;
  const int64_t in_plane = rank % plane;
  return {rank / plane, in_plane / shape.cp, in_plane % shape.cp, in_plane % shape.ep};
}

MeshGroups mesh_groups(const MeshShape& shape, int64_t world, int64_t rank) {
  const int64_t plane = data_parallel(shape, world) * shape.cp;
  const int64_t in_plane = rank % plane, first = rank - in_plane; // of this stage
  const int64_t block = shape.hsdp ? shape.hsdp_size : plane;
  const auto strided = [](int64_t begin, int64_t step, int64_t count) {
    vector<int64_t> ranks;
    for (int64_t i = 0; i < count; ++i) ranks.push_back(begin + i * step);
    return ranks;
  };
  const int64_t block_begin = first + in_plane / block * block;
  const int64_t cp = shape.cp, ep = shape.ep;
  vector<int64_t> head = strided(block_begin, 1, block);
  if (shape.head_share > 0 && rank < 2 * plane) {
    head = strided(block_begin % plane, 1, block);
    for (int64_t i = 0; i < block; ++i) head.push_back(head[index(i)] + plane);
  }
  return {
    .pipeline = strided(in_plane, plane, shape.pp),
    .plane = strided(first, 1, plane),
    .context = strided(first + in_plane / cp * cp, 1, cp),
    .expert = strided(first + in_plane / ep * ep, 1, ep),
    .expert_data = strided(first + in_plane % ep, ep, plane / ep),
    .dense_shard = strided(block_begin, 1, block),
    .head_shard = head,
    .expert_shard = strided(block_begin + in_plane % ep, ep, block / ep),
    .replicate = strided(first + in_plane % block, block, plane / block),
  };
}

string mesh_table(const MeshShape& shape, int64_t world) {
  string text = fmt::format("{} processes: {}\n{:>5} {:>4} {:>4} {:>4} {:>4}  {:16} {}\n", world,
    to_text(shape, world), "rank", "pp", "dp", "cp", "ep", "expert group", "same experts");
  for (int64_t rank = 0; rank < world; ++rank) {
    const MeshPlace place = mesh_place(shape, world, rank);
    const MeshGroups groups = mesh_groups(shape, world, rank);
    const auto range = [](const vector<int64_t>& ranks) {
      if (ranks.size() == 1) return fmt::format("{}", ranks[0]);
      const int64_t step = ranks[1] - ranks[0];
      return fmt::format(
        "{}..{}{}", ranks.front(), ranks.back(), step == 1 ? "" : fmt::format(" by {}", step));
    };
    text += fmt::format("{:5} {:4} {:4} {:4} {:4}  {:16} {}\n", rank, place.pp, place.dp, place.cp,
      place.ep, range(groups.expert), range(groups.expert_data));
  }
  return text;
}

Mesh make_mesh(const MeshShape& shape, const World& world, Device device) {
  Mesh mesh;
  mesh.shape = shape;
  mesh.dp = data_parallel(shape, world.size());
  mesh.place = mesh_place(shape, world.size(), world.rank());
  mesh.device = device;
  const MeshGroups groups = mesh_groups(shape, world.size(), world.rank());
  mesh.world = world.all();
  mesh.pipeline = world.group(groups.pipeline, "pipeline");
  for (size_t i = 1; i < groups.pipeline.size(); ++i) {
    const vector<int64_t> pair{groups.pipeline[i - 1], groups.pipeline[i]};
    const bool first = pair[0] == world.rank();
    if (!first && pair[1] != world.rank()) continue;
    for (Comm& link: first ? mesh.next : mesh.previous) link = world.group(pair, "stage link");
  }
  mesh.context = world.group(groups.context, "context");
  mesh.expert = world.group(groups.expert, "expert");
  // Groups of the same members share connections: nothing inside a layer waits for the others.
  map<vector<int64_t>, Comm> shared{{mesh.world.ranks(), mesh.world}};
  const auto share = [&](const vector<int64_t>& ranks, const string& name) {
    const auto [at, is_new] = shared.try_emplace(ranks);
    if (is_new) at->second = world.group(ranks, name);
    return at->second;
  };
  mesh.plane = share(groups.plane, "plane");
  mesh.dense_shard = share(groups.dense_shard, "dense_shard");
  mesh.head_shard = share(groups.head_shard, "head_shard");
  mesh.expert_shard = share(groups.expert_shard, "expert_shard");
  mesh.dense_replicate = mesh.expert_replicate = share(groups.replicate, "replicate");
  return mesh;
}
}
