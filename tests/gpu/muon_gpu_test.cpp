#include <ATen/ops/equal.h>
#include <ATen/ops/scalar_tensor.h>
#include "engine/optimizer.h"
#include "operators/muon.h"
#include "tests/gpu/gpu_check.h"

namespace pith::test {
namespace {
double frobenius_error(const Tensor& got, const Tensor& wanted) {
  const Tensor exact = wanted.cpu().to(at::kDouble);
  return ((got.cpu().to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

TEST(MuonGpu, NewtonSchulzAgreesWithCpu) {
  for (const auto& shape: std::vector<std::vector<int64_t>>{
         {5, 1, 17}, {3, 8, 8}, {2, 61, 130}, {7, 96, 128}, {2, 512, 2048}}) {
    SCOPED_TRACE(fmt::format("({})", fmt::join(shape, ", ")));
    const Tensor x = random_tensor("x", shape, at::kBFloat16);
    const Tensor exact = newton_schulz(x.to(at::kDouble), 2.5);
    EXPECT_LT(frobenius_error(newton_schulz(x.to(kGpu, at::kFloat), 2.5), exact), 1e-5);
    const Tensor y = newton_schulz(x.to(kGpu), 2.5);
    EXPECT_LT(frobenius_error(y, exact), 16 * 0x1p-9);
    EXPECT_TRUE(at::equal(newton_schulz(x.to(kGpu), 2.5), y)) << "other bits the second time";
  }
}

TEST(MuonGpu, MomentumAndUpdateAgreeWithCpu) {
  const int64_t n = 100'003;
  const auto make = [&](const char* name) { return random_tensor(name, {n}, at::kFloat); };
  for (const auto moments: {at::kFloat, at::kBFloat16}) {
    Tensor m = make("m").to(moments), there = m.to(kGpu);
    Tensor direction = at::empty({n}, at::kBFloat16), other = direction.to(kGpu);
    const Tensor grad = make("g"), scale = at::scalar_tensor(0.5f);
    muon_momentum(m, grad, scale, 0.95, direction);
    muon_momentum(there, grad.to(kGpu), scale.to(kGpu), 0.95, other);
    expect_close(there, m, 1e-6, "momentum");
    expect_close(other, direction, 1e-6, "direction");
    Tensor w = make("w"), v = at::empty({n}, at::kBFloat16), w_there = w.to(kGpu);
    Tensor v_there = v.to(kGpu);
    muon_update(w, direction, v, 1e-2, 0.1);
    muon_update(w_there, direction.to(kGpu), v_there, 1e-2, 0.1);
    expect_close(w_there, w, 1e-6, "master");
    EXPECT_TRUE(at::equal(v_there, w_there.to(at::kBFloat16)));
  }
}

// Steps of both optimizers with BF16 moments and averages, in batches of equal matrices on CUDA.
TEST(MuonGpu, StepsOfShardGroupsAgreeWithCpu) {
  RunConfig::Training training;
  training.optimizer = "muon";
  training.ema_decay = 0.9;
  const auto train = [&](at::Device device, at::ScalarType dtype) {
    std::deque<Parameter> own;
    own.emplace_back("q", std::vector<int64_t>{96, 64}, ParameterGroup::matrix, Init::normal);
    const std::vector<int64_t> halves{3, 128, 64}, columns{3, 64, 128};
    own.emplace_back("halves", halves,
      std::vector<HfTensor>{{"halves", halves, 0, 0, 3, Fused::rows}}, ParameterGroup::expert,
      Init::normal);
    own.emplace_back("columns", columns,
      std::vector<HfTensor>{{"columns", columns, 0, 0, 3, Fused::columns}}, ParameterGroup::expert,
      Init::normal);
    own.emplace_back("norm", std::vector<int64_t>{77}, ParameterGroup::norm, Init::ones);
    Units units(1);
    for (Parameter& parameter: own) units[0].push_back(&parameter);
    set_update_rules(units, units, training);
    Mesh mesh;
    mesh.device = device;
    auto groups = make_shard_groups(
      units, dtype, mesh, ShardGroup::Use::training, ShardMode::keep, optimizer_states(training));
    groups[0].initialize(1, 0.1, 2);
    for (int64_t step = 1; step <= 3; ++step) {
      for (const Parameter& parameter: own) {
        Tensor grad = parameter.grad;
        grad.copy_(random_tensor(fmt::format("{} {}", parameter.name, step), parameter.shape));
      }
      optimizer_step(groups, training, 1e-2, step, grad_norm(groups, mesh));
    }
    return std::pair(groups[0].master.cpu(), groups[0].ema.cpu());
  };
  for (const auto dtype: {at::kFloat, at::kBFloat16}) {
    for (const char* moments: {"float32", "bfloat16"}) {
      training.moments = moments;
      const auto [master, ema] = train(at::kCPU, dtype);
      const auto [master_there, ema_there] = train(kGpu, dtype);
      const double tolerance = dtype == at::kFloat ? 1e-5 : 5e-3;
      EXPECT_LT(frobenius_error(master_there, master), tolerance) << moments;
      EXPECT_LT(frobenius_error(ema_there, ema), tolerance) << moments;
    }
  }
}

} // namespace
} // namespace pith::test
