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

template <class Value>
std::string difference(const std::string& name, const Value& saved, const Value& now) {
  return fmt::format("\n  {}: {} in the checkpoint, {} now", name, saved, now);
}

}  // namespace

std::string TrainingState::to_json() const {
  auto corpora = nlohmann::ordered_json::array();
  for (const Source& source : sources)
    corpora.push_back({{"path", source.path},
                       {"fingerprint", source.fingerprint},
                       {"tokenizer_hash", source.tokenizer_hash},
                       {"weight", source.weight}});
  return nlohmann::ordered_json{{"step", step},
                                {"rows_read", rows_read},
                                {"tokens_seen", tokens_seen},
                                {"sources", corpora},
                                {"sequence_length", sequence_length},
                                {"data_seed", data_seed},
                                {"document_mask", document_mask},
                                {"packing", packing},
                                {"schedule", schedule}}
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
    for (const auto& corpus : json.at("sources"))
      state.sources.push_back({corpus.at("path"), corpus.at("fingerprint"),
                               corpus.at("tokenizer_hash"), corpus.at("weight")});
    json.at("sequence_length").get_to(state.sequence_length);
    json.at("data_seed").get_to(state.data_seed);
    json.at("document_mask").get_to(state.document_mask);
    json.at("packing").get_to(state.packing);
    json.at("schedule").get_to(state.schedule);
    return state;
  } catch (const nlohmann::json::exception& error) {
    PITH_FAIL("{} is not a training state: {}", source, error.what());
  }
}

void TrainingState::check_same_data(const TrainingState& other, const std::string& source) const {
  std::string differences;
  const auto compare = [&](const std::string& name, const auto& saved, const auto& now) {
    if (saved != now) differences += difference(name, saved, now);
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
  if (!differences.empty()) {
    PITH_FAIL_HINT(
        "restore these settings; or start a new run folder with model.init = this checkpoint",
        "{} cannot be resumed: its position in the data would mean other rows:{}", source,
        differences);
  }
}

std::string TrainingState::schedule_differences(const TrainingState& other) const {
  std::map<std::string, std::string> keys = schedule;
  keys.insert(other.schedule.begin(), other.schedule.end());
  const auto value = [](const auto& settings, const std::string& key) {
    const auto found = settings.find(key);
    return found == settings.end() ? "not in use" : found->second;
  };
  std::string differences;
  for (const auto& [key, unused] : keys) {
    const std::string saved = value(schedule, key), now = value(other.schedule, key);
    if (saved != now) differences += difference(key, saved, now);
  }
  return differences;
}

void collect_state(std::span<ShardGroup> groups, CheckpointContent& content) {
  for (const ShardGroup& group : groups) {
    const Tensor values = host_copy(group.values);
    const std::pair<const char*, Tensor> states[] = {{"master", host_copy(group.master)},
                                                     {"exp_avg", host_copy(group.exp_avg)},
                                                     {"exp_avg_sq", host_copy(group.exp_avg_sq)}};
    for (size_t i = 0; i < group.parameters().size(); ++i) {
      for (const HfTensor& tensor : group.parameters()[i]->tensors) {
        content.weights.emplace_back(tensor.name,
                                     Parameter::view_of(group.slice(values, i), tensor));
        for (const auto& [kind, buffer] : states) {
          content.optimizer.push_back(
              {kind, tensor.name, 0, tensor.numel(),
               group.slice(buffer, i).narrow(0, tensor.offset, tensor.numel())});
        }
      }
    }
  }
}

void restore_state(std::span<ShardGroup> groups, const std::filesystem::path& checkpoint) {
  const OptimizerReader reader(checkpoint);
  for (ShardGroup& group : groups) {
    const std::pair<const char*, Tensor> states[] = {
        {"master", group.master}, {"exp_avg", group.exp_avg}, {"exp_avg_sq", group.exp_avg_sq}};
    for (size_t i = 0; i < group.parameters().size(); ++i) {
      for (const HfTensor& tensor : group.parameters()[i]->tensors) {
        for (const auto& [kind, buffer] : states) {
          reader.read(kind, tensor,
                      group.slice(buffer, i).narrow(0, tensor.offset, tensor.numel()));
        }
      }
    }
    group.publish();
  }
}

void restore_weights(std::span<ShardGroup> groups, const std::filesystem::path& folder,
                     bool tied_head) {
  std::vector<Parameter*> parameters;
  std::vector<Tensor> targets;
  for (ShardGroup& group : groups) {
    parameters.insert(parameters.end(), group.parameters().begin(), group.parameters().end());
    for (Tensor& target : group.import_targets()) targets.push_back(std::move(target));
  }
  std::vector<std::string> may_be_left;
  if (tied_head) may_be_left.emplace_back("lm_head.weight");
  import_weights(HfFolder(folder), parameters, targets, may_be_left);
  for (ShardGroup& group : groups) group.publish();
}

std::string first_non_finite(std::span<ShardGroup> groups) {
  const c10::AutoGradMode no_grad(false);
  for (const ShardGroup& group : groups) {
    for (const Parameter* parameter : group.parameters())
      if (!all_finite(parameter->value)) return "weight " + parameter->name;
  }
  for (const ShardGroup& group : groups) {
    for (const Parameter* parameter : group.parameters())
      if (parameter->grad.defined() && !all_finite(parameter->grad))
        return "gradient of " + parameter->name;
  }
  return "";
}

}  // namespace pith
