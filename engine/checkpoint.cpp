#include "engine/checkpoint.h"
#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>
#include <nlohmann/json.hpp>

namespace pith {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(WrittenFile, bytes, xxh3, tensors)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Manifest, step, files)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(
  TrainingState, step, updates, skipped_in_row, rows_read, tokens_seen, data, schedule)

namespace {
using nlohmann::json;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kFormat = "pithtrain checkpoint";
constexpr const char* kEma = "ema/";
// Folders being made or removed; a killed process may leave them, the next save removes them.
constexpr string_view kSaving = ".saving-", kDeleting = ".deleting-";

string step_name(int64_t step) { return fmt::format("step-{:08}", step); }

// Steps with a folder "step-00000020" under root, newest first.
vector<int64_t> steps_under(const fs::path& root) {
  vector<int64_t> steps;
  for (const string& name: names_in(root)) {
    int64_t step = -1;
    if (name.starts_with("step-")) from_chars(&name[5], name.data() + name.size(), step);
    if (step >= 0 && step_name(step) == name) steps.push_back(step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

string manifest_text(int64_t step, const vector<WrittenFile>& files) {
  Manifest manifest{step, {}};
  for (const WrittenFile& file: files) manifest.files.emplace(file.name, file);
  json document = manifest;
  document.update({{"format", kFormat}, {"version", 1}});
  return seal_json(document.dump(1));
}

// A half-deleted folder must not look like a checkpoint: it is renamed, then removed as a leftover.
void set_aside(const fs::path& folder) {
  fs::rename(folder, folder.parent_path() / (string(kDeleting) + folder.filename().string()));
}

void remove_leftovers(const fs::path& root) {
  for (const string& name: names_in(root))
    if (name.starts_with(kSaving) || name.starts_with(kDeleting)) fs::remove_all(root / name);
}

// Empty when the checkpoint is complete, else the reason. Reads the manifest, not the data.
string incomplete(const fs::path& checkpoint) {
  return problem_of([&] {
    for (const auto& [name, file]: read_manifest(checkpoint).files) {
      const uint64_t bytes = fs::file_size(checkpoint / name);
      PITH_CHECK(
        bytes == file.bytes, "{} has {} bytes instead of {}", checkpoint / name, bytes, file.bytes);
    }
  });
}

void delete_older(const fs::path& root, int64_t step, int64_t keep_last) {
  int64_t kept = 1; // the new one
  for (const int64_t older: steps_under(root)) {
    const fs::path folder = root / step_name(older);
    if (older < step && incomplete(folder).empty() && ++kept > keep_last) set_aside(folder);
  }
}

// One save by this rank, one of those that write the checkpoint together.
struct Save {
  fs::path root;
  CheckpointContent content;
  int64_t keep_last, rank, ranks;
  string name = step_name(content.step);
  fs::path temporary = root / (string(kSaving) + name);

  // What `part` throws becomes an Error that names the checkpoint; rank 0 removes the temporary
  // folder.
  template <class Part> void guard(const Part& part) const {
    const string problem = problem_of(part);
    if (problem.empty()) return;
    std::error_code ignored; // the first error is the one to tell
    if (rank == 0) fs::remove_all(temporary, ignored);
    PITH_FAIL("cannot save checkpoint {}: {}", root / name, problem);
  }

  // Rank 0 makes the temporary folder. Collective.
  void prepare(const Comm& world) {
    guard([&] {
      if (rank == 0) {
        if (fs::create_directories(root)) sync_folder(fs::absolute(root).parent_path());
        remove_leftovers(root);
        fs::create_directory(temporary);
      }
      world.barrier();
    });
  }

  vector<WrittenFile> write_own_files() const {
    vector<WrittenFile> written = write_weights(temporary, rank, content.weights);
    if (!content.ema.empty()) {
      fs::create_directory(temporary / kEma);
      for (WrittenFile& file: write_weights(temporary / kEma, rank, content.ema)) {
        file.name = kEma + file.name;
        written.push_back(std::move(file));
      }
    }
    if (content.optimizer.empty()) return written;
    const auto file = fmt::format("optimizer/shard-{:05}.safetensors", rank);
    fs::create_directory(temporary / "optimizer");
    written.push_back(write_safetensors(temporary / file, content.optimizer));
    written.back().name = file;
    sync_folder(temporary / "optimizer");
    return written;
  }

  void write_files() const {
    vector<WrittenFile> written;
    vector<string> problems;
    if (const auto own = problem_of([&] { written = write_own_files(); }); !own.empty())
      problems.push_back(own);
    const auto done = [](int64_t of_rank) { return fmt::format(".done-{:05}", of_rank); };
    if (rank > 0) { // tells rank 0 what was written, as a manifest, or why it could not be
      const string part = done(rank) + ".part";
      write_file(temporary, part,
        problems.empty() ? manifest_text(content.step, written) : problems.front());
      fs::rename(temporary / part, temporary / done(rank));
    }
    const auto give_up = chrono::steady_clock::now() + chrono::minutes(10);
    for (int64_t r = 1; rank == 0 && r < ranks; ++r) { // in any case: nobody must write any more
      const fs::path file = temporary / done(r);
      while (!fs::exists(file) && chrono::steady_clock::now() < give_up)
        std::this_thread::sleep_for(chrono::milliseconds(10));
      const string text = fs::exists(file) ? read_file(file) : "nothing heard for 10 minutes";
      if (!text.starts_with('{')) {
        problems.push_back(fmt::format("rank {}: {}", r, text));
        continue;
      }
      for (const auto& [its_name, its]: parse_manifest(text, file.string()).files)
        written.push_back(its);
      fs::remove(file);
    }
    PITH_CHECK(problems.empty(), "{}", fmt::join(problems, "; "));
    if (rank > 0) return;
    for (const string inside: {"", kEma}) {
      if (ranges::none_of(
            written, [&](const WrittenFile& file) { return file.name.starts_with(inside); }))
        continue;
      written.push_back(write_weight_index(temporary, written, inside));
      for (const auto& [file, bytes]: content.files)
        written.push_back(write_file(temporary, inside + file, bytes));
      sync_folder(temporary / inside);
    }
    written.push_back(write_file(temporary, "training_state.json", content.training_state));
    write_file(temporary, kManifest, manifest_text(content.step, written));
    sync_folder(temporary);
    // What has the name was refused by newest_checkpoint, or this run would have gone on from it.
    if (fs::exists(root / name)) set_aside(root / name);
    fs::rename(temporary, root / name);
    sync_folder(root);
  }

  void run() const {
    guard([&] { write_files(); });
    if (rank > 0) return;
    try {
      if (keep_last > 0) delete_older(root, content.step, keep_last);
      remove_leftovers(root);
    } catch (const fs::filesystem_error& error) {
      PITH_FAIL(
        "checkpoint {} is saved, but an older one could not be deleted: {}", root / name, error);
    }
  }
};

// Throws unless the file is as the manifest says; names the tensors that are not.
void verify_file(const fs::path& path, const WrittenFile& expected) {
  const string name = path.string();
  const MappedFile file = map_file(path);
  PITH_CHECK(
    file.size == expected.bytes, "{} has {} bytes instead of {}", name, file.size, expected.bytes);
  if (xxh3(file.bytes()) == expected.xxh3) return;
  PITH_CHECK(
    !expected.tensors.empty(), "{} is damaged: its bytes do not match the manifest's sum", name);
  vector<string> damaged;
  const SafetensorsFile tensors(path);
  for (const auto& [tensor, sum]: expected.tensors)
    if (!tensors.header().tensors.contains(tensor) || xxh3(tensors.bytes(tensor)) != sum)
      damaged.push_back(tensor);
  PITH_FAIL("{} is damaged in {}{}", name, damaged.empty() ? "its header" : "tensor ",
    fmt::join(damaged, ", "));
}

// On the host, never sharing memory with the training process's own.
Tensor host_copy(const Tensor& buffer) {
  return buffer.is_cpu() ? buffer.clone() : buffer.to(kCPU);
}

bool all_finite(const Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

// What a rank keeps of a piece, by its kind.
vector<NamedTensor> states_of(const ShardGroup& group, const ShardGroup::Piece& piece) {
  const int64_t second = group.second_moment_at(piece.begin);
  vector<NamedTensor> states;
  const auto add = [&](const char* kind, const Tensor& buffer, int64_t begin) {
    states.emplace_back(kind, buffer.narrow(0, begin, piece.count));
  };
  add("master", group.master, piece.begin);
  add(second < 0 ? "momentum" : "exp_avg", group.exp_avg, piece.begin);
  if (second >= 0) add("exp_avg_sq", group.exp_avg_sq, second);
  if (group.ema.defined()) add("ema", group.ema, piece.begin);
  return states;
}

vector<NamedTensor> collect_weights(span<ShardGroup> groups, const Comm& expert) {
  vector<NamedTensor> weights;
  for (ShardGroup& group: groups) {
    if (group.replicate().rank() > 0) continue;
    group.before_forward();
    if (group.unit() % group.shard().size() == group.shard().rank()) {
      const Tensor values = host_copy(group.values);
      for (size_t i = 0; i < group.parameters().size(); ++i)
        for (const HfTensor& tensor: group.parameters()[i]->tensors) {
          Tensor whole = Parameter::view_of(group.slice(values, i), tensor);
          if (tensor.rows > 0 && expert.size() > 1) { // the other experts belong to it
            const Tensor held = Parameter::view_of(group.slice(group.values, i), tensor);
            Tensor all = at::empty(tensor.whole_shape(), held.options());
            expert.all_gather_async(all, held).wait();
            if (group.unit() % expert.size() != expert.rank()) continue;
            whole = host_copy(all);
          }
          weights.emplace_back(tensor.name, whole);
        }
    }
    group.after_forward();
  }
  return weights;
}
}

string state_key(const string& kind, const string& tensor, int64_t offset, int64_t total) {
  return fmt::format("{}/{}@{}/{}", kind, tensor, offset, total);
}

CheckpointWriter::~CheckpointWriter() {
  try {
    finish();
  } catch (const exception& error) { fmt::print(stderr, "{}\n", error); }
}

void CheckpointWriter::start(
  fs::path root, CheckpointContent content, int64_t keep_last, const Comm& world) {
  finish();
  Save save{std::move(root), std::move(content), keep_last, world.rank(), world.size()};
  save.prepare(world);
  saving_ = std::async(std::launch::async, [save = std::move(save)]() mutable {
    Save(std::move(save)).run(); // its memory must not wait for finish()
  });
}

Manifest parse_manifest(string_view text, const string& source) {
  check_seal(text, source);
  const json document = parse_json(text, source);
  try {
    PITH_CHECK(document.at("format") == kFormat && document.at("version") == 1,
      "{}: not the manifest of a checkpoint this program reads", source);
    auto manifest = document.get<Manifest>();
    for (auto& [name, file]: manifest.files) {
      const fs::path path(name);
      PITH_CHECK(path.is_relative() && path.lexically_normal() == path && *path.begin() != "..",
        "{}: {} is not a path inside the checkpoint", source, name);
      file.name = name;
    }
    return manifest;
  } catch (const json::exception& error) { PITH_FAIL("{}: {}", source, error); }
}

Manifest read_manifest(const fs::path& checkpoint) {
  const fs::path path = checkpoint / kManifest;
  return parse_manifest(map_file(path).bytes(), path.string());
}

optional<fs::path> newest_checkpoint(const fs::path& root, vector<string>* skipped) {
  for (const int64_t step: steps_under(root)) {
    const string reason = incomplete(root / step_name(step));
    if (reason.empty()) return root / step_name(step);
    if (skipped) skipped->push_back(fmt::format("{} is not complete: {}", step_name(step), reason));
  }
  return nullopt;
}

vector<string> verify_checkpoint(const fs::path& folder) {
  Manifest manifest;
  vector<string> problems{problem_of([&] { manifest = read_manifest(folder); })};
  vector<const WrittenFile*> files;
  for (const auto& [name, file]: manifest.files) files.push_back(&file);
  problems.resize(1 + files.size());
  at::parallel_for(0, ssize(files), 1, [&](int64_t begin, int64_t end) {
    for (auto i = index(begin); i < index(end); ++i)
      problems[i + 1] = problem_of([&] { verify_file(folder / files[i]->name, *files[i]); });
  });
  std::erase(problems, "");
  return problems;
}

void check_checkpoint(const fs::path& folder) {
  const vector<string> problems = verify_checkpoint(folder);
  if (!problems.empty())
    PITH_FAIL_HINT("move this checkpoint away to continue from the one before",
      "checkpoint {} can't be used:\n  - {}", folder, fmt::join(problems, "\n  - "));
}

OptimizerReader::OptimizerReader(const fs::path& folder) : folder_(folder / "optimizer") {
  const vector<string> names = names_in(folder_);
  if (names.empty())
    PITH_FAIL_HINT("use the folder as [model] init to start with a new optimizer",
      "{} holds no optimizer state", folder);
  static const regex form("(.+)@([0-9]{1,18})/([0-9]{1,18})");
  for (const string& name: names) {
    const SafetensorsFile& file = files_.emplace_back(folder_ / name);
    for (const auto& [key, entry]: file.header().tensors) {
      std::smatch parts;
      PITH_CHECK(std::regex_match(key, parts, form) && entry.shape.size() == 1 &&
          (entry.dtype == kFloat || entry.dtype == kBFloat16),
        "{}: {} is not a flat slice KIND/TENSOR@OFFSET/TOTAL of float32 or bfloat16", file.path(),
        key);
      pieces_[parts[1]].push_back(
        {files_.size() - 1, key, std::stoll(parts[2]), entry.shape[0], std::stoll(parts[3])});
    }
  }
  for (auto& [name, pieces]: pieces_) ranges::sort(pieces, {}, &Piece::offset);
}

void OptimizerReader::read(
  const string& kind, const HfTensor& tensor, Tensor out, int64_t first) const {
  const auto found = pieces_.find(kind + "/" + tensor.name);
  constexpr const char* kAdvice =
    "a tensor's optimizer, moments and average stay as saved; or take the folder as model.init";
  if (found == pieces_.end())
    PITH_FAIL_HINT(kAdvice, "{}: there is no {} of {}", folder_, kind, tensor.name);
  const int64_t last = first + out.numel();
  int64_t copied = 0;
  NoGradGuard no_grad;
  for (const auto& [file, key, offset, count, total]: found->second) {
    PITH_CHECK(total == tensor.whole_numel(), "{}: {} of {} has {} elements, the model's tensor {}",
      folder_, kind, tensor.name, total, tensor.whole_numel());
    const int64_t begin = max(first, offset), end = min(last, offset + count);
    if (begin >= end) continue;
    PITH_CHECK(begin == first + copied, "{}: {} of {}: a slice starts at {}, where {} is expected",
      folder_, kind, tensor.name, begin, first + copied);
    const Tensor slice = files_[file].tensor(key);
    if (slice.scalar_type() != out.scalar_type())
      PITH_FAIL_HINT(kAdvice, "{}: {} of {} is {}, here it is {}", folder_, kind, tensor.name,
        dtype_name(slice.scalar_type()), dtype_name(out.scalar_type()));
    out.narrow(0, begin - first, end - begin).copy_(slice.narrow(0, begin - offset, end - begin));
    copied += end - begin;
  }
  PITH_CHECK(copied == out.numel(),
    "{}: {} of {}: the slices hold {} of the elements from {} to {}", folder_, kind, tensor.name,
    copied, first, last);
}

string TrainingState::to_json() const { return nlohmann::json(*this).dump(2) + "\n"; }

TrainingState TrainingState::from_json(const string& text, const string& source) {
  const auto state = exactly<TrainingState>(parse_json(text, source));
  PITH_CHECK(state, "{} is not a training state", source);
  return *state;
}

string TrainingState::differences(const Settings& saved, const Settings& now) {
  map<string, pair<string, string>> values; // of each key: saved, now
  for (const auto& [key, value]: saved) values[key] = {value, "not in use"};
  for (const auto& [key, value]: now)
    values.try_emplace(key, "not in use", "").first->second.second = value;
  string text;
  for (const auto& [key, both]: values)
    if (both.first != both.second)
      text += fmt::format("\n  {}: {} in the checkpoint, {} now", key, both.first, both.second);
  return text;
}

void collect_state(span<ShardGroup> groups, CheckpointContent& content, const Comm& expert) {
  content.weights = collect_weights(groups, expert);
  if (!groups.empty() && groups[0].ema.defined()) {
    // The averages take the weights' place for a moment, as the same steps make a folder of them.
    for (ShardGroup& group: groups) group.show(group.ema);
    content.ema = collect_weights(groups, expert);
    for (ShardGroup& group: groups) group.show(group.master);
  }
  for (const ShardGroup& group: groups) {
    if (group.replicate().rank() > 0) continue;
    for (const ShardGroup::Piece& piece: group.pieces())
      for (const auto& [kind, state]: states_of(group, piece))
        content.optimizer.emplace_back(
          state_key(kind, piece.tensor->name, piece.first, piece.tensor->whole_numel()),
          host_copy(state));
  }
}

void restore_state(span<ShardGroup> groups, const fs::path& checkpoint) {
  const OptimizerReader reader(checkpoint);
  for (ShardGroup& group: groups) {
    for (const ShardGroup::Piece& piece: group.pieces())
      for (const auto& [kind, state]: states_of(group, piece))
        reader.read(kind, *piece.tensor, state, piece.first);
    group.show(group.master);
  }
}

void restore_weights(span<ShardGroup> groups, const fs::path& folder, bool tied_head,
  const vector<vector<Parameter*>>& whole_model) {
  vector<ImportTarget> targets;
  vector<string> may_be_left;
  if (tied_head) may_be_left.emplace_back("lm_head.weight");
  const auto allow = [&](const Parameter& parameter) {
    for (const HfTensor& tensor: parameter.tensors) may_be_left.push_back(tensor.name);
  };
  for (const auto& unit: whole_model)
    for (const Parameter* parameter: unit) allow(*parameter);
  for (const ShardGroup& group: groups) {
    for (const Parameter* parameter: group.parameters()) allow(*parameter);
    for (const auto& [parameter, tensor, first, begin, count]: group.pieces())
      targets.push_back({tensor, first, group.import_target().narrow(0, begin, count)});
  }
  import_weights(HfFolder(folder), targets, may_be_left);
  for (ShardGroup& group: groups) group.publish();
}

string first_non_finite(span<ShardGroup> groups) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [what, buffer]:
    {pair{"weight ", &ShardGroup::value_part}, pair{"gradient of ", &ShardGroup::grad_part}})
    for (const ShardGroup& group: groups) {
      const Tensor& part = group.*buffer;
      if (!part.defined() || all_finite(part)) continue;
      for (const auto& [parameter, tensor, first, begin, count]: group.pieces())
        if (!all_finite(part.narrow(0, begin, count))) return what + parameter->name;
    }
  return "";
}
}
