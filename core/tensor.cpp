#include "core/tensor.h"

namespace pith {
namespace {

constexpr std::pair<at::ScalarType, const char*> kDtypes[] = {{at::kFloat, "float32"},
    {at::kDouble, "float64"}, {at::kBFloat16, "bfloat16"}, {at::kHalf, "float16"},
    {at::kFloat8_e4m3fn, "float8_e4m3"}, {at::kFloat8_e5m2, "float8_e5m2"}, {at::kLong, "int64"},
    {at::kInt, "int32"}, {at::kShort, "int16"}, {at::kChar, "int8"}, {at::kByte, "uint8"},
    {at::kBool, "bool"}};

std::string shape_text(at::IntArrayRef shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(size < 0 ? "any" : std::to_string(size));
  return fmt::format("({})", fmt::join(sizes, ", "));
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  for (const auto& [type, name] : kDtypes)
    if (type == dtype) return name;
  return c10::toString(dtype);
}

std::string describe(const Tensor& tensor, std::string_view name) {
  if (!tensor.defined()) return fmt::format("{}: undefined", name);
  return fmt::format("{}: {} {} on {}", name, dtype_name(tensor.scalar_type()),
      shape_text(tensor.sizes()), tensor.device().str());
}

void check_shape(
    const Tensor& tensor, std::string_view name, std::initializer_list<int64_t> shape) {
  const bool same = tensor.defined() &&
      std::ranges::equal(tensor.sizes(), shape,
          [](int64_t size, int64_t wanted) { return wanted < 0 || size == wanted; });
  PITH_CHECK(same, "{}; its shape should be {}", describe(tensor, name), shape_text(shape));
}

void check_dtype(const Tensor& tensor, std::string_view name, at::ScalarType dtype) {
  PITH_CHECK(tensor.defined() && tensor.scalar_type() == dtype, "{}; its dtype should be {}",
      describe(tensor, name), dtype_name(dtype));
}

void check_tensor(const Tensor& tensor, std::string_view name, at::ScalarType dtype,
    std::initializer_list<int64_t> shape) {
  check_shape(tensor, name, shape);
  check_dtype(tensor, name, dtype);
}

}  // namespace pith
