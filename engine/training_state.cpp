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

std::string difference(const std::string& name, const auto& saved, const auto& now) {
  if (saved == now) return "";
  return fmt::format("\n  {}: {} in the checkpoint, {} now", name, saved, now);
}

std::array<std::pair<const char*, Tensor>, 3> states_of(const ShardGroup& group) {
  return {{{"master", group.master}, {"exp_avg", group.exp_avg}, {"exp_avg_sq", group.exp_avg_sq}}};
}

}  // namespace

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TrainingState::Source, path, fingerprint, tokenizer_hash, weight)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TrainingState, step, rows_read, tokens_seen, sources,
    sequence_length, data_seed, document_mask, packing, schedule)

std::string TrainingState::to_json() const { return nlohmann::json(*this).dump(2) + "\n"; }

TrainingState TrainingState::from_json(const std::string& text, const std::string& source) {
  const nlohmann::json document = parse_json(text, source);
  try {
    return document.get<TrainingState>();
  } catch (const nlohmann::json::exception& error) {
    PITH_FAIL("{} is not a training state: {}", source, error.what());
  }
}

void TrainingState::check_same_data(const TrainingState& other, const std::string& source) const {
  std::string differences;
  const auto compare = [&](const std::string& name, const auto& saved, const auto& now) {
    differences += difference(name, saved, now);
  };
  compare("number of corpora in data.train", sources.size(), other.sources.size());
  for (size_t i = 0; i < sources.size() && sources.size() == other.sources.size(); ++i) {
    const Source &saved = sources[i], &now = other.sources[i];
    const std::string name =
        saved.path == now.path ? now.path : fmt::format("{} (was {})", now.path, saved.path);
    compare(fmt::format("corpus {}: fingerprint", name), saved.fingerprint, now.fingerprint);
    compare(fmt::format("corpus {}: tokenizer", name), saved.tokenizer_hash, now.tokenizer_hash);
    compare(fmt::format("corpus {}: weight, as an integer ratio", name), saved.weight, now.weight);
  }
  compare("data.sequence_length", sequence_length, other.sequence_length);
  compare("data.seed", data_seed, other.data_seed);
  compare("data.document_mask", document_mask, other.document_mask);
  compare("data.packing", packing, other.packing);
  if (!differences.empty())
    PITH_FAIL_HINT(
        "restore these settings; or start a new run folder with model.init = this checkpoint",
        "{} cannot be resumed: its position in the data would mean other rows:{}", source,
        differences);
}

std::string TrainingState::schedule_differences(const TrainingState& other) const {
  std::map<std::string, std::pair<std::string, std::string>> values;  // of each key: saved, now
  for (const auto& [key, value] : schedule) values[key] = {value, "not in use"};
  for (const auto& [key, value] : other.schedule)
    values.try_emplace(key, "not in use", "").first->second.second = value;
  std::string differences;
  for (const auto& [key, both] : values) differences += difference(key, both.first, both.second);
  return differences;
}

void collect_state(
    std::span<ShardGroup> groups, CheckpointContent& content, const Comm& expert) {
  for (ShardGroup& group : groups) {
    if (group.replicate().rank() > 0) continue;
    group.before_forward();
    if (group.unit() % group.shard().size() == group.shard().rank()) {
      const Tensor values = host_copy(group.values);
      for (size_t i = 0; i < group.parameters().size(); ++i)
        for (const HfTensor& tensor : group.parameters()[i]->tensors) {
          Tensor whole = Parameter::view_of(group.slice(values, i), tensor);
          if (tensor.held() < tensor.numel()) {  // the others' experts belong to it
            const Tensor mine = Parameter::view_of(group.slice(group.values, i), tensor);
            Tensor all = at::empty(tensor.shape, mine.options());
            expert.all_gather_async(all, mine).wait();
            if (group.unit() % expert.size() != expert.rank()) continue;
            whole = host_copy(all);
          }
          content.weights.emplace_back(tensor.name, whole);
        }
    }
    group.after_forward();
    auto states = states_of(group);
    for (auto& [kind, buffer] : states) buffer = host_copy(buffer);
    for (const auto& [parameter, tensor, first, begin, count] : group.pieces())
      for (const auto& [kind, buffer] : states)
        content.optimizer.push_back(
            {kind, tensor->name, first, tensor->numel(), buffer.narrow(0, begin, count)});
  }
}

void restore_state(std::span<ShardGroup> groups, const std::filesystem::path& checkpoint) {
  const OptimizerReader reader(checkpoint);
  for (ShardGroup& group : groups) {
    for (const auto& [kind, buffer] : states_of(group))
      for (const auto& [parameter, tensor, first, begin, count] : group.pieces())
        reader.read(kind, *tensor, buffer.narrow(0, begin, count), first);
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
