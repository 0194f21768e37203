#include "core/parameter.h"
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include "tests/allocate.h"

namespace pith {
namespace {
TEST(Parameter, OneHuggingFaceTensor) {
  const Parameter p("model.norm.weight", {6}, ParameterGroup::norm, Init::ones);
  ASSERT_EQ(p.tensors.size(), 1u);
  EXPECT_EQ(p.tensors[0].name, "model.norm.weight");
  EXPECT_EQ(p.tensors[0].shape, (std::vector<int64_t>{6}));
  EXPECT_EQ(p.tensors[0].offset, 0);
  EXPECT_EQ(p.numel(), 6);
}

TEST(Parameter, FusedFromSeveral) {
  // q (4, 3) and k (2, 3) one below the other.
  const Parameter p(
    "qkv", {6, 3}, {{"q", {4, 3}, 0}, {"k", {2, 3}, 12}}, ParameterGroup::matrix, Init::normal);
  const Tensor flat = at::arange(18);
  const Tensor k = Parameter::view_of(flat.view({6, 3}), p.tensors[1]);
  EXPECT_TRUE(at::equal(k, at::arange(12, 18).view({2, 3})));
  EXPECT_EQ(k.data_ptr(), flat.narrow(0, 12, 6).data_ptr()) << "must be a view";
}

TEST(Parameter, HoldsRowsOfATensor) {
  const HfTensor two_of_four{"experts", {2, 3, 2}, 6, 1, 4};
  EXPECT_EQ(two_of_four.numel(), 12);
  EXPECT_EQ(two_of_four.first_element(), 6);
  EXPECT_EQ(two_of_four.whole_shape(), (std::vector<int64_t>{4, 3, 2}));
  EXPECT_EQ(two_of_four.whole_numel(), 24);
  const Parameter p("p", {18}, {{"a", {6}, 0}, two_of_four}, ParameterGroup::expert, Init::normal);
  EXPECT_TRUE(
    at::equal(Parameter::view_of(at::arange(18), p.tensors[1]), at::arange(6, 18).view({2, 3, 2})));
  EXPECT_THROW(Parameter("p", {24}, {two_of_four}, ParameterGroup::expert, Init::normal), Error);
}

TEST(Parameter, TensorsMustCoverTheParameter) {
  const auto make = [](std::vector<HfTensor> tensors) {
    Parameter("qkv", {6, 3}, std::move(tensors), ParameterGroup::matrix, Init::normal);
  };
  EXPECT_THROW(make({{"q", {4, 3}, 0}, {"k", {2, 3}, 13}}), Error); // a gap
  EXPECT_THROW(make({{"q", {4, 3}, 0}, {"k", {2, 3}, 11}}), Error); // an overlap
  EXPECT_THROW(make({{"q", {4, 3}, 0}}), Error); // too short
  EXPECT_THROW(make({}), Error);
}

TEST(Parameter, ViewOfRefuses) {
  EXPECT_THROW(Parameter::view_of(at::arange(6), {"w", {7}, 0}), Error);
  EXPECT_THROW(Parameter::view_of(at::arange(6), {"w", {3}, 4}), Error);
  EXPECT_THROW(Parameter::view_of(at::arange(6).view({2, 3}).t(), {"w", {6}, 0}), Error);
}

TEST(Parameter, Allocate) {
  Parameter p("w", {2, 3}, ParameterGroup::matrix, Init::normal);
  allocate(p, at::kBFloat16, at::kCPU);
  EXPECT_TRUE(p.value.is_leaf() && p.value.requires_grad());
  EXPECT_EQ(p.value.scalar_type(), at::kBFloat16);
  EXPECT_EQ(p.grad.scalar_type(), at::kFloat);
  EXPECT_EQ(p.grad.sizes(), p.value.sizes());
  EXPECT_FALSE(p.grad.requires_grad());
  Parameter::view_of(p.value, p.tensors[0]).fill_(2.0); // a leaf, written without a guard
  EXPECT_EQ(p.value.sum().item<double>(), 12.0);
  allocate(p, at::kDouble, at::kCPU);
  EXPECT_EQ(p.grad.scalar_type(), at::kDouble);
}

} // namespace
} // namespace pith
