#include "core/parameter.h"

namespace pith {
Parameter::Parameter(
  string hf_name, vector<int64_t> its_shape, ParameterGroup its_group, Init its_init)
    : Parameter(hf_name, its_shape, {HfTensor{hf_name, its_shape, 0}}, its_group, its_init) {}

Parameter::Parameter(string its_name, vector<int64_t> its_shape, vector<HfTensor> parts,
  ParameterGroup its_group, Init its_init)
    : name(std::move(its_name)), shape(std::move(its_shape)), tensors(std::move(parts)),
      group(its_group), init(its_init) {
  int64_t end = 0;
  for (HfTensor& part: tensors) {
    part.rule.decays = group == ParameterGroup::matrix || group == ParameterGroup::embedding ||
      (group == ParameterGroup::expert && shape.size() > 2);
    PITH_CHECK(part.offset == end,
      "parameter {}: {} starts at element {}, the one before ends at {}", name, part.name,
      part.offset, end);
    end += part.numel();
  }
  PITH_CHECK(end == numel(), "parameter {} has {} elements, its Hugging Face tensors {}", name,
    numel(), end);
}

Tensor Parameter::view_of(const Tensor& flat_or_shaped, const HfTensor& part) {
  const int64_t end = part.offset + part.numel();
  PITH_CHECK(flat_or_shaped.defined() && flat_or_shaped.is_contiguous() && part.offset >= 0 &&
      end <= flat_or_shaped.numel(),
    "elements {} to {} cannot be taken out of {}", part.offset, end,
    describe(flat_or_shaped, part.name));
  // Detached: writes into an autograd leaf's view are not recorded.
  return flat_or_shaped.detach().view({-1}).narrow(0, part.offset, part.numel()).view(part.shape);
}
}
