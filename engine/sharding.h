// A shard group: the flat buffers behind one unit of parameters (embedding, a layer, the head).
#pragma once
#include <span>
#include <string>
#include <vector>

#include "core/comm.h"
#include "core/parameter.h"

namespace pith {

// Owns the weights in the compute dtype, FP32 gradients, FP32 master weights and moments of its
// parameters, each one flat buffer; Parameter::value and Parameter::grad are views into them. A
// group of one process holds everything. Parameters start at multiples of 64 elements; the padding
// stays zero.
class ShardGroup {
 public:
  // A range of the flat buffers whose parameters share their weight decay.
  struct Segment {
    bool decays;  // matrices, experts and embeddings
    int64_t begin, end;
  };
  enum class Use { training, inference };  // inference: no gradients, masters, moments

  ShardGroup(std::vector<Parameter*> parameters, at::ScalarType dtype, at::Device device, Use use);

  // Random weights, tensor by tensor under their Hugging Face names: the same for any layout.
  void initialize(uint64_t seed, double init_std, int64_t num_layers);
  // Where imported weights go: masters in training, else the weights. One flat tensor for each
  // parameter; call publish() afterwards.
  std::vector<Tensor> import_targets();
  // Rounds the masters into the weights (after import or initialisation; the optimizer does it
  // itself).
  void publish();

  const std::vector<Parameter*>& parameters() const { return parameters_; }
  const std::vector<Segment>& segments() const { return segments_; }
  // The part of a flat buffer that belongs to parameter i, flat.
  Tensor slice(const Tensor& buffer, size_t i) const;

  Tensor values, grads, master, exp_avg, exp_avg_sq;  // flat; the last four undefined for inference

 private:
  std::vector<Parameter*> parameters_;
  std::vector<int64_t> offsets_;
  std::vector<Segment> segments_;
};

// One group for each unit of a model.
std::vector<ShardGroup> make_shard_groups(const std::vector<std::vector<Parameter*>>& units,
                                          at::ScalarType dtype, at::Device device,
                                          ShardGroup::Use use);

// The parameters of all groups in order.
std::vector<Parameter*> all_parameters(std::span<ShardGroup> groups);

}  // namespace pith
