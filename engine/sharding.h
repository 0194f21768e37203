// Shard groups: the flat buffers behind a unit of parameters (embedding, layer, head), cut over
// processes (ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054; HSDP: with replicas).
#pragma once
#include "core/mesh.h"
#include "core/parameter.h"

namespace pith {
struct ModelPart; // models/model.h

// What training keeps of each element beside its master weight.
struct OptimizerStates {
  bool bf16_moments = false;
  bool ema = false; // a moving average of the weights
};

// keep: weights and gradients stay whole; one reduce-scatter a step. reshard: weights are whole
// between before_* and after_*, gradients from before_backward to after_backward; one
// reduce-scatter a micro-batch. A group of one process is always keep.
enum class ShardMode { keep, reshard };

// Weights in the compute dtype, FP32 gradients, masters and moments, each one flat buffer;
// Parameter::value and Parameter::grad are views into the first two while the group lives.
// Parameters start at multiples of 64 elements, the size is one of 64 x ranks; the padding stays
// zero. Rank i of the shard group owns the i-th of equal parts: masters, moments and averages exist
// in parts only. Ranks of the replicate group hold the same part.
// All calls but the constructor's are collective, in the same order for all groups.
class ShardGroup {
 public:
  // A range of the part whose tensors are updated alike.
  struct Segment {
    UpdateRule rule;
    int64_t begin, end;
    int64_t second = 0; // where it begins in exp_avg_sq; Muon has no second moments
  };
  // Elements [first, first + count) of a tensor are [begin, begin + count) of the part.
  struct Piece {
    const Parameter* parameter;
    const HfTensor* tensor;
    int64_t first, begin, count;
  };
  enum class Use { training, inference }; // inference: no gradients, masters, moments

  // `unit`: which of the model's units it belongs to, counted from the last.
  ShardGroup(vector<Parameter*> parameters, ScalarType dtype, Device device, Use use,
    Comm shard = {}, Comm replicate = {}, ShardMode mode = ShardMode::keep, int64_t unit = 0,
    OptimizerStates states = {});

  // Random weights, the same for any layout.
  void initialize(uint64_t seed, double init_std, int64_t num_layers);
  // Where imported weights go, before publish(): the masters in training, else the weights.
  Tensor import_target() const { return master.defined() ? master : value_part; }
  // Weights, and the average's start, from new masters.
  void publish();
  // Rounds masters or averages into the weights and shares them.
  void show(const Tensor& part);
  // After value_part was written: gathers the others' parts (keep), or drops what was gathered.
  void share_values();

  // The pipeline's verbs; in keep mode before_* waits for shared values, the others but the last do
  // nothing. Calls nest: several micro-batches' passes may be open at once.
  void prefetch(); // starts to gather the weights, ahead of before_*; idempotent
  void before_forward(); // Parameter::value may be read on the current stream until the next one
  void after_forward();
  // Parameter::value may be read and Parameter::grad added to until after_backward(), when delayed
  // weight gradients are in too. A forward that adds some (the head's) stands between these two.
  void before_backward();
  // Starts to reduce the gradient: in reshard mode always, in keep mode where `last` says that no
  // backward of this group follows in this step. At most two groups' whole gradients wait.
  void after_backward(bool last = false);

  void zero_grad() { // the start of a step
    (mode_ == ShardMode::keep ? grads : grad_part).zero_();
    reduced_ = false;
  }
  // The steps of finish_step(groups), below.
  void start_reduction();
  [[nodiscard]] Work finish_reduction();

  const vector<Parameter*>& parameters() const { return parameters_; }
  const vector<Segment>& segments() const { return segments_; }
  const Comm& shard() const { return shard_; }
  const Comm& replicate() const { return replicate_; }
  ShardMode mode() const { return mode_; }
  int64_t unit() const { return unit_; }
  int64_t part_begin() const { return shard_.rank() * value_part.numel(); }
  vector<Piece> pieces() const; // what this rank's part holds, in order
  int64_t second_moment_at(int64_t begin) const; // of a piece, in exp_avg_sq; -1: it is Muon's
  Tensor slice(const Tensor& buffer, size_t i) const { // parameter i's of a whole buffer, flat
    return buffer.narrow(0, offsets_[i], parameters_[i]->numel());
  }

  // Flat. values and grads: whole; in reshard mode without memory outside of their verbs.
  // value_part and grad_part (the sum over ranks after finish_step): this rank's, in keep mode
  // views of those. All but the values are undefined for inference. exp_avg: AdamW's first moment,
  // Muon's momentum; exp_avg_sq: of AdamW's segments, one after the other; ema: perhaps undefined.
  Tensor values, grads, value_part, grad_part, master, exp_avg, exp_avg_sq, ema;
 private:
  struct Reduction {
    Work work;
    Tensor whole, sum, target;
    void finish() {
      work.wait();
      target.add_(sum);
    }
  };
  using Reductions = deque<Reduction>;
  friend vector<ShardGroup> make_shard_groups(const vector<vector<Parameter*>>& units,
    ScalarType dtype, const Mesh& mesh, Use use, ShardMode mode, OptimizerStates states);

  vector<Parameter*> parameters_;
  vector<int64_t> offsets_;
  vector<Segment> segments_;
  Comm shard_, replicate_;
  ShardMode mode_;
  int64_t unit_;
  Tensor gathered_, opened_; // reshard: the memory of values and grads
  Work gather_, reduction_; // under way: of the weights; keep: into grad_part
  int64_t uses_ = 0, backwards_ = 0; // open before_*, before_backward
  bool reduced_ = false; // keep: the reduction of this step is started
  shared_ptr<Reductions> reductions_; // reshard: under way, of all groups of a model
};

// Elements [first, first + target.numel()) of one tensor.
void initialize_tensor(Tensor& target, const Parameter& parameter, const HfTensor& tensor,
  int64_t first, uint64_t seed, double init_std, int64_t num_layers);

// A group for each unit over mesh.dense_*, and, where EP > 1, one for its experts over
// mesh.expert_*.
vector<ShardGroup> make_shard_groups(const vector<vector<Parameter*>>& units, ScalarType dtype,
  const Mesh& mesh, ShardGroup::Use use, ShardMode mode = ShardMode::keep,
  OptimizerStates states = {});

// After the last backward of a step: every grad_part becomes the sum over shard and replicate
// groups. Calls `then` with each group whose sum is there while the next ones arrive.
void finish_step(span<ShardGroup> groups, const function<void(const ShardGroup&)>& then);

// The groups of one unit, none where this process does not hold it. `tied`: the head's embedding,
// whose own backward follows the head's last.
struct UnitShards {
  vector<ShardGroup*> groups;
  ShardGroup* tied = nullptr;
  void prefetch() const { ranges::for_each(groups, &ShardGroup::prefetch); }
  void before_forward() const { start(&ShardGroup::before_forward); }
  void after_forward() const { ranges::for_each(groups, &ShardGroup::after_forward); }
  void before_backward() const { start(&ShardGroup::before_backward); }
  void after_backward(bool last = false) const {
    for (ShardGroup* group: groups) group->after_backward(last && group != tied);
  }
 private:
  void start(void (ShardGroup::*verb)()) const {
    prefetch(); // of all, before the first one waits
    ranges::for_each(groups, verb);
  }
};

// Addresses into a part's groups. head_weight: null where it has no head.
struct ModelShards {
  UnitShards embedding, head;
  map<int64_t, UnitShards> layers; // by index in the whole model
  ModelShards() = default;
  ModelShards(span<ShardGroup> groups, const ModelPart& part, const Parameter* head_weight);
};

vector<Parameter*> all_parameters(span<ShardGroup> groups);
}
