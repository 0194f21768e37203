#include "core/tensor.h"
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

namespace pith {
namespace {
template <class F> std::string error_of(F f) {
  try {
    f();
  } catch (const Error& error) { return error.what(); }
  return "no error";
}

TEST(Tensor, DescribeNamesShapeDtypeDevice) {
  EXPECT_EQ(describe(at::empty({3, 5}, at::kBFloat16), "hidden"), "hidden: bfloat16 (3, 5) on cpu");
  EXPECT_EQ(describe(at::empty({}, at::kDouble), "loss"), "loss: float64 () on cpu");
  EXPECT_EQ(describe({}, "mask"), "mask: undefined");
}

TEST(Tensor, CheckShape) {
  const Tensor x = at::empty({4, 7});
  check_shape(x, "x", {4, 7});
  check_shape(x, "x", {-1, 7});
  const std::string error = error_of([&] { check_shape(x, "gate", {4, -1, 8}); });
  EXPECT_NE(
    error.find("gate: float32 (4, 7) on cpu; its shape should be (4, any, 8)"), std::string::npos)
    << error;
  EXPECT_NE(
    error_of([&] { check_shape({}, "gate", {1}); }).find("gate: undefined"), std::string::npos);
  EXPECT_THROW(check_shape(x, "x", {}), Error);
}

TEST(Tensor, CheckDtype) {
  check_dtype(at::empty({1}, at::kLong), "tokens", at::kLong);
  const std::string error =
    error_of([] { check_dtype(at::empty({1}, at::kInt), "tokens", at::kLong); });
  EXPECT_NE(error.find("tokens: int32 (1) on cpu; its dtype should be int64"), std::string::npos)
    << error;
}

TEST(Tensor, ExactIntegers) {
  EXPECT_EQ(div_exact(12, 4), 3);
  EXPECT_THROW(div_exact(13, 4), Error);
  EXPECT_THROW(div_exact(13, 0), Error);
  EXPECT_EQ(narrow<int32_t>(int64_t{2147483647}), 2147483647);
  EXPECT_THROW(narrow<int32_t>(int64_t{2147483648}), Error);
  EXPECT_THROW(narrow<uint32_t>(-1), Error);
  EXPECT_THROW(narrow<int32_t>(uint64_t{0xFFFFFFFFFFFFFFFF}), Error);
}

} // namespace
} // namespace pith
