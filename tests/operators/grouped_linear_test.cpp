#include "operators/grouped_linear.h"
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include "tests/operators/error_text.h"
#include "tests/operators/gradient_check.h"
#include "tests/operators/values.h"

namespace pith::test {
namespace {
// counts[e] rows for expert e.
ExpertPlan plan_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> expert;
  for (size_t e = 0; e < counts.size(); ++e) {
    expert.insert(expert.end(), static_cast<size_t>(counts[e]), static_cast<int64_t>(e));
  }
  return make_expert_plan(
    ids(expert, {static_cast<int64_t>(expert.size()), 1}), static_cast<int64_t>(counts.size()));
}

const std::vector<int64_t> kCounts[] = {{3, 0, 2, 1}, {0, 0, 5}, {1}, {0, 0}, {4, 4}};

TEST(GroupedLinear, GradientsMatchFiniteDifferences) {
  const OneThread scope;
  for (const auto& counts: kCounts) {
    const ExpertPlan plan = plan_of(counts);
    Parameter weight = make_parameter("w", {static_cast<int64_t>(counts.size()), 3, 5});
    const Tensor x = random_tensor("x", {plan.num_slots(), 5});
    check_gradients([&] { return grouped_linear(x, weight, plan); }, {x}, {&weight});
  }
}

TEST(GroupedLinear, AffineGradientsMatchFiniteDifferences) {
  const OneThread scope;
  for (const auto& counts: kCounts) {
    const ExpertPlan plan = plan_of(counts);
    const auto experts = static_cast<int64_t>(counts.size());
    Parameter weight = make_parameter("w", {experts, 5, 3}),
              bias = make_parameter("b", {experts, 3});
    const Tensor x = random_tensor("x", {plan.num_slots(), 5});
    check_gradients([&] { return grouped_affine(x, weight, bias, plan); }, {x}, {&weight, &bias});
  }
}

// The transposed weight with no bias is grouped_linear.
TEST(GroupedLinear, AffineEqualsLinear) {
  const ExpertPlan plan = plan_of({0, 29, 1, 17, 0, 7});
  for (auto dtype: {at::kFloat, at::kBFloat16}) {
    Parameter weight = make_parameter("w", {6, 17, 33}, dtype),
              turned = make_parameter("t", {6, 33, 17}, dtype);
    Parameter bias = make_parameter("b", {6, 17}, dtype, 0.0);
    turned.value.detach().copy_(weight.value.detach().transpose(1, 2));
    Tensor x = random_tensor("x", {plan.num_slots(), 33}, dtype), x2 = x.clone();
    x.set_requires_grad(true), x2.set_requires_grad(true);
    const Tensor y = grouped_linear(x, weight, plan), y2 = grouped_affine(x2, turned, bias, plan);
    const Tensor dy = random_tensor("dy", y.sizes().vec(), dtype);
    y.backward(dy), y2.backward(dy);
    const double tolerance = dtype == at::kFloat ? 1e-6 : 1.0 / 256;
    EXPECT_LE(relative_difference(y2, y), tolerance);
    EXPECT_LE(relative_difference(x2.grad(), x.grad()), tolerance);
    EXPECT_LE(relative_difference(turned.grad, weight.grad.transpose(1, 2)), 2e-6);
    EXPECT_EQ(bias.grad[0].abs().max().item<double>(), 0); // no rows
    EXPECT_LE(relative_difference(bias.grad[5], dy.narrow(0, 47, 7).to(at::kDouble).sum(0)), 1e-6);
  }
}

TEST(GroupedLinear, PermutedSwigluIsThatOfTheMapOfPermutedRows) {
  const SwigluForm form{1.5f, 0.8f, 1, true};
  const Tensor idx = (at::arange(60, at::kLong) * 7).remainder(5).view({20, 3});
  const ExpertPlan plan = make_expert_plan(idx.masked_fill(idx == 3, -1), 5);
  for (auto dtype: {at::kFloat, at::kBFloat16}) {
    std::vector<Parameter> a, b;
    for (auto* p: {&a, &b}) {
      p->push_back(make_parameter("w", {5, 33, 18}, dtype, 0.2));
      p->push_back(make_parameter("b", {5, 18}, dtype, 0.2));
    }
    const Tensor rows = random_tensor("rows", {20, 33}, dtype).set_requires_grad(true);
    const Tensor again = rows.detach().clone().set_requires_grad(true);
    const Tensor y = swiglu(grouped_affine(permute(rows, plan), a[0], a[1], plan), form);
    const Tensor same = permuted_swiglu(again, b[0], plan, form, &b[1]);
    EXPECT_TRUE(at::equal(y, same));
    const Tensor dy = random_tensor("dy", y.sizes().vec(), dtype);
    y.backward(dy);
    same.backward(dy);
    EXPECT_LE(
      relative_difference(again.grad(), rows.grad()), dtype == at::kFloat ? 1e-6 : 1.0 / 256);
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(a[i].grad, b[i].grad));

    Parameter c = make_parameter("w", {5, 18, 33}, dtype, 0.2);
    Parameter d = make_parameter("w", {5, 18, 33}, dtype, 0.2);
    const Tensor third = rows.detach().clone().set_requires_grad(true);
    const Tensor fourth = rows.detach().clone().set_requires_grad(true);
    const Tensor z = swiglu(grouped_linear(permute(third, plan), c, plan));
    const Tensor same_z = permuted_swiglu(fourth, d, plan);
    EXPECT_TRUE(at::equal(z, same_z));
    z.backward(dy);
    same_z.backward(dy);
    EXPECT_LE(
      relative_difference(fourth.grad(), third.grad()), dtype == at::kFloat ? 1e-6 : 1.0 / 256);
    EXPECT_TRUE(at::equal(c.grad, d.grad));
  }
}

TEST(GroupedLinear, EqualsOneProductPerExpert) {
  const ExpertPlan plan = plan_of({0, 129, 1, 127, 0, 7});
  for (auto dtype: {at::kFloat, at::kBFloat16}) {
    Parameter weight = make_parameter("w", {6, 17, 33}, dtype, 0.2);
    const Tensor x = random_tensor("x", {plan.num_slots(), 33}, dtype).set_requires_grad(true);
    const Tensor y = grouped_linear(x, weight, plan);
    EXPECT_EQ(y.scalar_type(), dtype);
    const Tensor dy = random_tensor("dy", y.sizes().vec(), dtype);
    y.backward(dy);
    // BF16: FP32 sums rounded once; FP32: the order of sums of 33 (129 in the weight) terms.
    const double tolerance = dtype == at::kFloat ? 1e-6 : 1.0 / 256;
    const int32_t* end = plan.offsets.const_data_ptr<int32_t>();
    for (int64_t e = 0, begin = 0; e < 6; begin = end[e++]) {
      const int64_t count = end[e] - begin;
      const Tensor w = weight.value.detach()[e].to(at::kDouble);
      auto rows = [&](
                    const Tensor& t) { return t.detach().narrow(0, begin, count).to(at::kDouble); };
      EXPECT_LE(relative_difference(rows(y), at::matmul(rows(x), w.t())), tolerance);
      EXPECT_LE(relative_difference(rows(x.grad()), at::matmul(rows(dy), w)), tolerance);
      EXPECT_LE(relative_difference(weight.grad[e], at::matmul(rows(dy).t(), rows(x))), 2e-6);
    }
    EXPECT_FALSE(weight.value.grad().defined());
  }
}

// Known fault 7: an expert without rows has a gradient of exactly what was there before.
TEST(GroupedLinear, ExpertsWithoutRowsAreUntouched) {
  const ExpertPlan plan = plan_of({2, 0, 3});
  Parameter weight = make_parameter("w", {3, 4, 4}, at::kFloat);
  weight.grad.fill_(0.1);
  grouped_linear(random_tensor("x", {5, 4}, at::kFloat), weight, plan).sum().backward();
  EXPECT_TRUE(at::equal(weight.grad[1], at::full_like(weight.grad[1], 0.1)));
  EXPECT_FALSE(at::equal(weight.grad[0], at::full_like(weight.grad[0], 0.1)));
}

TEST(GroupedLinear, WithoutGradModeNothingIsRecorded) {
  const ExpertPlan plan = plan_of({2, 3});
  Parameter weight = make_parameter("w", {2, 4, 4}, at::kFloat);
  at::NoGradGuard no_grad;
  EXPECT_FALSE(
    grouped_linear(random_tensor("x", {5, 4}, at::kFloat), weight, plan).requires_grad());
}

TEST(GroupedLinear, NamesWhatDoesNotFit) {
  const ExpertPlan plan = plan_of({2, 3});
  Parameter weight = make_parameter("experts.up", {2, 4, 6}, at::kFloat),
            other = make_parameter("w", {3, 4, 6});
  const Tensor x = random_tensor("x", {5, 6}, at::kFloat);
  EXPECT_TRUE(
    contains(error_text([&] { grouped_linear(x.narrow(0, 0, 4), weight, plan); }), "x: float32"));
  EXPECT_TRUE(
    contains(error_text([&] { grouped_linear(x.to(at::kBFloat16), weight, plan); }), "bfloat16"));
  EXPECT_TRUE(contains(error_text([&] { grouped_linear(x, other, plan); }), "w: "));
  Parameter bias = make_parameter("experts.bias", {2, 4}, at::kFloat);
  EXPECT_TRUE(
    contains(error_text([&] { grouped_affine(x, weight, bias, plan); }), "grouped_affine: x"));
  EXPECT_TRUE(contains(
    error_text([&] { grouped_affine(x.narrow(1, 0, 4), weight, bias, plan); }), "experts.bias"));
}

} // namespace
} // namespace pith::test
