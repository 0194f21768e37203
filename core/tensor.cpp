#include "core/tensor.h"

namespace pith {
namespace {

std::string shape_text(at::IntArrayRef shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? "any" : std::to_string(shape[i]);
  }
  return text + ")";
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kFloat8_e4m3fn:
      return "float8_e4m3";
    case at::kFloat8_e5m2:
      return "float8_e5m2";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kShort:
      return "int16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

std::string describe(const Tensor& tensor, std::string_view name) {
  if (!tensor.defined()) return fmt::format("{}: undefined", name);
  return fmt::format("{}: {} {} on {}", name, dtype_name(tensor.scalar_type()),
      shape_text(tensor.sizes()), tensor.device().str());
}

void check_shape(
    const Tensor& tensor, std::string_view name, std::initializer_list<int64_t> shape) {
  const at::IntArrayRef wanted(shape.begin(), shape.size());
  bool same = tensor.defined() && tensor.dim() == static_cast<int64_t>(wanted.size());
  for (size_t i = 0; same && i < wanted.size(); ++i) {
    same = wanted[i] < 0 || tensor.size(static_cast<int64_t>(i)) == wanted[i];
  }
  PITH_CHECK(same, "{}; its shape should be {}", describe(tensor, name), shape_text(wanted));
}

void check_dtype(const Tensor& tensor, std::string_view name, at::ScalarType dtype) {
  PITH_CHECK(tensor.defined() && tensor.scalar_type() == dtype, "{}; its dtype should be {}",
      describe(tensor, name), dtype_name(dtype));
}

}  // namespace pith
