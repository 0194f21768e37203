#include "engine/training_state.h"

#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>

#include <nlohmann/json.hpp>

namespace pith {
namespace {

// A flat buffer on the host, never sharing memory with the training process's own.
Tensor host_copy(const Tensor& buffer) {
  return buffer.is_cpu() ? buffer.clone() : buffer.to(at::kCPU);
}

bool all_finite(const Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

}  // namespace

std::string TrainingState::to_json() const {
  return nlohmann::ordered_json{{"step", step},
                                {"rows_read", rows_read},
                                {"tokens_seen", tokens_seen},
                                {"corpus_fingerprint", corpus_fingerprint},
                                {"sequence_length", sequence_length},
                                {"data_seed", data_seed},
                                {"document_mask", document_mask}}
             .dump(2) +
         "\n";
}

TrainingState TrainingState::from_json(const std::string& text, const std::string& source) {
  try {
    const auto json = nlohmann::json::parse(text);
    TrainingState state;
    json.at("step").get_to(state.step);
    json.at("rows_read").get_to(state.rows_read);
    json.at("tokens_seen").get_to(state.tokens_seen);
    json.at("corpus_fingerprint").get_to(state.corpus_fingerprint);
    json.at("sequence_length").get_to(state.sequence_length);
    json.at("data_seed").get_to(state.data_seed);
    json.at("document_mask").get_to(state.document_mask);
    return state;
  } catch (const nlohmann::json::exception& error) {
    PITH_FAIL("{} is not a training state: {}", source, error.what());
  }
}

void TrainingState::check_same_data(const TrainingState& other, const std::string& source) const {
  std::string differences;
  const auto compare = [&](const char* name, const auto& saved, const auto& now) {
    if (saved != now)
      differences += fmt::format("\n  {}: {} in the checkpoint, {} now", name, saved, now);
  };
  compare("corpus (data.train)", corpus_fingerprint, other.corpus_fingerprint);
  compare("data.sequence_length", sequence_length, other.sequence_length);
  compare("data.seed", data_seed, other.data_seed);
  compare("data.document_mask", document_mask, other.document_mask);
  if (!differences.empty()) {
    PITH_FAIL_HINT(
        "restore these settings; or start a new run folder with model.init = this checkpoint",
        "{} cannot be resumed: its position in the data would mean other rows:{}", source,
        differences);
  }
}

void collect_state(std::span<ShardGroup> groups, CheckpointContent& content) {
  for (ShardGroup& group : groups) {
    if (group.replicate().rank() > 0) continue;
    group.before_forward();
    if (group.unit() % group.shard().size() == group.shard().rank()) {
      const Tensor values = host_copy(group.values);
      for (size_t i = 0; i < group.parameters().size(); ++i) {
        for (const HfTensor& tensor : group.parameters()[i]->tensors)
          content.weights.emplace_back(tensor.name,
                                       Parameter::view_of(group.slice(values, i), tensor));
      }
    }
    group.after_forward();
    const std::pair<const char*, Tensor> states[] = {{"master", host_copy(group.master)},
                                                     {"exp_avg", host_copy(group.exp_avg)},
                                                     {"exp_avg_sq", host_copy(group.exp_avg_sq)}};
    for (const auto& [parameter, tensor, first, begin, count] : group.pieces()) {
      for (const auto& [kind, buffer] : states)
        content.optimizer.push_back(
            {kind, tensor->name, first, tensor->numel(), buffer.narrow(0, begin, count)});
    }
  }
}

void restore_state(std::span<ShardGroup> groups, const std::filesystem::path& checkpoint) {
  const OptimizerReader reader(checkpoint);
  for (ShardGroup& group : groups) {
    const std::pair<const char*, Tensor> states[] = {
        {"master", group.master}, {"exp_avg", group.exp_avg}, {"exp_avg_sq", group.exp_avg_sq}};
    for (const auto& [parameter, tensor, first, begin, count] : group.pieces()) {
      for (const auto& [kind, buffer] : states)
        reader.read(kind, *tensor, buffer.narrow(0, begin, count), first);
    }
    group.publish();
  }
}

void restore_weights(std::span<ShardGroup> groups, const std::filesystem::path& folder,
                     bool tied_head, const std::vector<std::vector<Parameter*>>& whole_model) {
  std::vector<ImportTarget> targets;
  std::vector<std::string> may_be_left;
  if (tied_head) may_be_left.emplace_back("lm_head.weight");
  const auto allow = [&](const Parameter& parameter) {
    for (const HfTensor& tensor : parameter.tensors) may_be_left.push_back(tensor.name);
  };
  for (const auto& unit : whole_model)
    for (const Parameter* parameter : unit) allow(*parameter);
  for (const ShardGroup& group : groups) {
    for (const Parameter* parameter : group.parameters()) allow(*parameter);
    for (const auto& [parameter, tensor, first, begin, count] : group.pieces())
      targets.push_back({tensor, first, group.import_target().narrow(0, begin, count)});
  }
  import_weights(HfFolder(folder), targets, may_be_left);
  for (ShardGroup& group : groups) group.publish();
}

std::string first_non_finite(std::span<ShardGroup> groups) {
  const c10::AutoGradMode no_grad(false);
  const auto find = [&](const char* what, Tensor ShardGroup::* buffer) -> std::string {
    for (const ShardGroup& group : groups) {
      const Tensor& part = group.*buffer;
      if (!part.defined() || all_finite(part)) continue;
      for (const auto& [parameter, tensor, first, begin, count] : group.pieces())
        if (!all_finite(part.narrow(0, begin, count))) return what + parameter->name;
    }
    return "";
  };
  const std::string weight = find("weight ", &ShardGroup::value_part);
  return weight.empty() ? find("gradient of ", &ShardGroup::grad_part) : weight;
}

}  // namespace pith
