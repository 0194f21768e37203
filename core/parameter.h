// A trained tensor: how it is computed with, accumulated, initialised, named on disk.
#pragma once
#include <c10/util/accumulate.h>
#include "core/tensor.h"

namespace pith {
// output_normal: std / sqrt(2 layers). log_decay: log of a uniform number in 0.01 .. 16.
enum class Init { normal, output_normal, ones, zeros, log_decay };

// Decides weight decay: matrices, experts, embeddings decay; experts' biases (E, n) do not.
enum class ParameterGroup { matrix, expert, embedding, router, norm, bias };

// How a tensor is updated (engine/optimizer.h).
struct UpdateRule {
  bool muon = false; // else AdamW
  bool decays = false; // by training.weight_decay, else by weight_decay_other
  double lr_scale = 1; // of the scheduled rate
  double weight_decay = -1; // in the place of both, unless negative
  auto operator<=>(const UpdateRule&) const = default;
};

// Gate and up projection in one tensor: halves of a matrix's rows, or every other column.
enum class Fused { none, rows, columns };

// One tensor of the Hugging Face folder: a contiguous range of a parameter's elements. A fused
// parameter (q, k, v; the experts' gate and up) concatenates several.
struct HfTensor {
  string name; // "model.layers.0.self_attn.q_proj.weight"
  vector<int64_t> shape; // as in the Hugging Face checkpoint; dim 0 may hold less
  int64_t offset; // first element in the flattened parameter
  int64_t first_row = 0, rows = 0; // first of so many rows; 0: dim 0 is whole
  Fused fused = Fused::none;
  UpdateRule rule = {};

  int64_t numel() const { return c10::multiply_integers(shape); }
  int64_t first_element() const { // in the whole tensor, flattened
    return rows == 0 ? 0 : numel() / shape[0] * first_row;
  }
  vector<int64_t> whole_shape() const {
    vector<int64_t> whole = shape;
    if (rows > 0) whole[0] = rows;
    return whole;
  }
  int64_t whole_numel() const { return c10::multiply_integers(whole_shape()); }
};

// Operators and shard groups keep its address. `value`, `grad`: views that ShardGroup binds.
struct Parameter {
  string name; // unique; the Hugging Face name where there is one
  vector<int64_t> shape;
  vector<HfTensor> tensors; // in order, gap-free, all elements
  ParameterGroup group = ParameterGroup::matrix;
  Init init = Init::normal;

  Tensor value; // compute dtype, an autograd leaf whose .grad() is never allocated
  Tensor grad; // FP32 (FP64 for FP64), same shape; operators' backward adds into it
  uint64_t version = 0; // updates of value, for cached copies

  Parameter() = default;
  // One Hugging Face tensor, or several concatenated along the first dimension.
  Parameter(string hf_name, vector<int64_t> shape, ParameterGroup group, Init init);
  Parameter(
    string name, vector<int64_t> shape, vector<HfTensor> tensors, ParameterGroup group, Init init);
  Parameter(Parameter&&) = default;
  Parameter& operator=(Parameter&&) = default;

  int64_t numel() const { return c10::multiply_integers(shape); }
  // A view of one Hugging Face tensor's part, in its shape.
  static Tensor view_of(const Tensor& flat_or_shaped, const HfTensor& part);
};
}
