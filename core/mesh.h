// The one authority on parallel dimensions: world = PP x DP x CP, experts folded into the DP x CP
// plane.
#pragma once
#include "core/comm.h"

namespace pith {

// Sizes and this process's groups. Only the layout pp = dp = cp = ep = 1 exists in this build.
struct Mesh {
  Comm world;   // all processes
  Comm plane;   // DP x CP: dense parameters are sharded over it, losses are summed over it
  Comm expert;  // EP: consecutive ranks of the plane that divide the experts among them
  at::Device device = at::kCPU;
};

}  // namespace pith
