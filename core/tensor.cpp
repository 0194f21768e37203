#include "core/tensor.h"

namespace pith {
namespace {
string shape_text(at::IntArrayRef shape) {
  vector<string> sizes;
  for (const int64_t size: shape) sizes.push_back(size < 0 ? "any" : to_string(size));
  return fmt::format("({})", fmt::join(sizes, ", "));
}
}

string dtype_name(ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

string describe(const Tensor& tensor, string_view name) {
  if (!tensor.defined()) return fmt::format("{}: undefined", name);
  return fmt::format("{}: {} {} on {}", name, dtype_name(tensor.scalar_type()),
    shape_text(tensor.sizes()), tensor.device().str());
}

void check_shape(const Tensor& tensor, string_view name, initializer_list<int64_t> shape) {
  const bool same = tensor.defined() &&
    ranges::equal(tensor.sizes(), shape,
      [](int64_t size, int64_t wanted) { return wanted < 0 || size == wanted; });
  PITH_CHECK(same, "{}; its shape should be {}", describe(tensor, name), shape_text(shape));
}

void check_dtype(const Tensor& tensor, string_view name, ScalarType dtype) {
  PITH_CHECK(tensor.defined() && tensor.scalar_type() == dtype, "{}; its dtype should be {}",
    describe(tensor, name), dtype_name(dtype));
}

void check_tensor(
  const Tensor& tensor, string_view name, ScalarType dtype, initializer_list<int64_t> shape) {
  check_shape(tensor, name, shape);
  check_dtype(tensor, name, dtype);
}
}
