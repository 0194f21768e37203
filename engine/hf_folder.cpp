#include "engine/hf_folder.h"
#include <nlohmann/json.hpp>
#include "core/comm.h"

namespace pith {
namespace {
using nlohmann::json;

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kSingle = "model.safetensors";
constexpr string_view kUnnumbered = "weights-"; // files of write_weights
constexpr size_t kListed = 3; // names of one kind that are listed singly

// One error with all problems, a line each.
[[noreturn]] void fail_with(const string& what, const vector<string>& problems) {
  PITH_FAIL("{}: {} problem{}\n  - {}", what, problems.size(), problems.size() == 1 ? "" : "s",
    fmt::join(problems, "\n  - "));
}

// Appends "kind: name" for each name or summary of many.
void report(vector<string>& problems, const string& kind, const vector<string>& names) {
  for (const string& line: summarize_names(names))
    problems.push_back(fmt::format("{}: {}", kind, line));
}

map<string, string> read_weight_map(const fs::path& path) {
  using Names = map<string, string>;
  const json index = read_json(path);
  const auto map = exactly<Names>(index.is_object() ? index.value("weight_map", json()) : index);
  PITH_CHECK(map, "{}: there is no object weight_map of file names", path);
  for (const auto& [name, file]: *map) // in this folder: an index can't be trusted to stay inside
    PITH_CHECK(fs::path(file).filename() == file && file != ".." && file != ".",
      "{}: {} lies in {}, which is not a file name", path, name, file);
  return *map;
}

// The two tensors of one (E, K, N) in MXFP4, whose matrices lie there transposed.
constexpr const char *kBlocks = "_blocks", *kScales = "_scales";
constexpr int64_t kGroup = 32; // numbers that share a scale

bool is_packed(const HfFolder& folder, const HfTensor& tensor) {
  return tensor.shape.size() == 3 && tensor.shape[1] % kGroup == 0 &&
    !folder.file_of(tensor.name) && folder.file_of(tensor.name + kBlocks);
}
}

vector<string> summarize_names(vector<string> names) {
  ranges::sort(names, [](const string& a, const string& b) {
    return ::strverscmp(a.c_str(), b.c_str()) < 0; // numbers by their values
  });
  static const regex number("[0-9]+");
  map<string, vector<string>> alike;
  for (const string& name: names) alike[std::regex_replace(name, number, "#")].push_back(name);
  vector<string> lines;
  for (const auto& [pattern, group]: alike) {
    if (group.size() <= kListed) lines.insert(lines.end(), group.begin(), group.end());
    else lines.push_back(fmt::format("{} to {} ({})", group.front(), group.back(), group.size()));
  }
  return lines;
}

HfFolder::HfFolder(const fs::path& folder) : path_(folder) {
  const bool indexed = fs::exists(folder / kIndex), single = fs::exists(folder / kSingle);
  PITH_CHECK(fs::is_directory(folder), "{} is not a folder", folder);
  if (!indexed && !single)
    PITH_FAIL_HINT("a model folder holds config.json and *.safetensors files",
      "{} holds neither {} nor {}", folder, kSingle, kIndex);
  map<string, string> weight_map;
  if (indexed) weight_map = read_weight_map(folder / kIndex);
  set<string> shards;
  for (const auto& [name, file]: weight_map) shards.insert(file);
  if (!indexed) shards.insert(kSingle);
  PITH_CHECK(!single || shards.contains(kSingle), "{}: {} and {} are both there and disagree",
    folder, kSingle, kIndex);

  vector<string> problems;
  for (const string& shard: shards) {
    if (const auto problem = problem_of([&] { files_.emplace_back(folder / shard); });
      !problem.empty()) {
      problems.push_back(problem);
      continue;
    }
    vector<string> unlisted, absent;
    const auto& tensors = files_.back().header().tensors;
    for (const auto& [name, entry]: tensors) {
      if (indexed && !weight_map.contains(name)) {
        unlisted.push_back(name);
      } else if (const auto [first, fresh] = file_of_.emplace(name, files_.size() - 1); !fresh) {
        problems.push_back(fmt::format("tensor {} is in two files: {} and {}", name,
          files_[first->second].path().filename(), shard));
      }
    }
    for (const auto& [name, file]: weight_map)
      if (file == shard && !tensors.contains(name)) absent.push_back(name);
    report(problems, shard + " holds a tensor that the index does not list", unlisted);
    report(problems, "the index lists a tensor that " + shard + " does not hold", absent);
  }
  if (!problems.empty()) fail_with(folder.string(), problems);
}

vector<string> HfFolder::names() const {
  vector<string> names;
  for (const auto& [name, file]: file_of_) names.push_back(name);
  return names;
}

Tensor HfFolder::tensor(const string& name) const {
  const SafetensorsFile* file = file_of(name);
  PITH_CHECK(file, "{}: there is no tensor {}", path_, name);
  return file->tensor(name);
}

Tensor dequantize_mxfp4(const Tensor& blocks, const Tensor& scales) {
  constexpr array<float, 8> kMagnitude{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  check_tensor(scales, "MXFP4 scales", kByte, {-1, -1});
  check_tensor(blocks, "MXFP4 blocks", kByte, {scales.size(0), scales.size(1), kGroup / 2});
  Tensor out = at::empty({scales.size(0), scales.size(1) * kGroup}, TensorOptions(kFloat));
  const auto* block = blocks.const_data_ptr<uint8_t>();
  const auto* scale = scales.const_data_ptr<uint8_t>();
  auto* value = out.mutable_data_ptr<float>();
  at::parallel_for(0, scales.numel(), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const float unit = scale[group] == 255 ? NAN : std::ldexp(1.0f, scale[group] - 127);
      for (int64_t i = group * kGroup; i < (group + 1) * kGroup; ++i) {
        const int code = block[i / 2] >> (i % 2 * 4);
        value[i] = (code & 8 ? -unit : unit) * kMagnitude[index(code & 7)];
      }
    }
  });
  return out;
}

void import_tensor(const HfFolder& folder, const ImportTarget& to) {
  const string& name = to.tensor->name;
  const int64_t last = to.first + to.target.numel();
  if (!is_packed(folder, *to.tensor)) {
    to.target.copy_(folder.tensor(name).view(-1).narrow(0, to.first, to.target.numel()));
    return;
  }
  const Tensor blocks = folder.tensor(name + kBlocks), scales = folder.tensor(name + kScales);
  const int64_t numel = to.tensor->shape[1] * to.tensor->shape[2];
  for (int64_t e = to.first / numel; e * numel < last; ++e) { // one matrix in memory at a time
    const int64_t begin = max(to.first, e * numel), end = min(last, (e + 1) * numel);
    const Tensor matrix = dequantize_mxfp4(blocks[e], scales[e]).t().contiguous().view(-1);
    to.target.narrow(0, begin - to.first, end - begin)
      .copy_(matrix.narrow(0, begin - e * numel, end - begin));
  }
}

void import_weights(
  const HfFolder& folder, span<const ImportTarget> targets, span<const string> optional_extra) {
  vector<string> missing, left_over, ignored, problems;
  set<string> used;
  const auto use = [&](const string& name, const vector<int64_t>& shape, bool packed) {
    used.insert(name);
    const SafetensorsFile* file = folder.file_of(name);
    if (!file) return missing.push_back(name);
    const TensorEntry& entry = file->header().tensors.at(name);
    if (entry.shape != shape)
      problems.push_back(fmt::format("{}: shape ({}) in the folder, ({}) in the model", name,
        fmt::join(entry.shape, ", "), fmt::join(shape, ", ")));
    const bool number = at::isFloatingType(entry.dtype) && c10::elementSize(entry.dtype) > 1;
    if (packed ? entry.dtype != kByte : !number)
      problems.push_back(fmt::format("{}: dtype {} is no {}", name, dtype_name(entry.dtype),
        packed ? "uint8" : "bfloat16, float16, float32 or float64"));
  };
  for (const auto& [tensor, first, target]: targets) {
    vector<int64_t> shape = tensor->whole_shape();
    const bool packed = is_packed(folder, *tensor);
    if (packed) shape = {shape[0], shape[2], shape[1] / kGroup};
    use(tensor->name + (packed ? kScales : ""), shape, packed);
    if (!packed) continue;
    shape.push_back(kGroup / 2);
    use(tensor->name + kBlocks, shape, true);
  }
  for (const string& name: optional_extra) {
    used.insert(name);
    if (!folder.file_of(name)) used.insert({name + kBlocks, name + kScales});
  }
  for (const string& name: folder.names()) {
    const bool other = name.starts_with("model.visual.") || name.starts_with("mtp.");
    if (!used.count(name)) (other ? ignored : left_over).push_back(name);
  }
  report(problems, "missing in the folder", missing);
  report(problems, "in the folder, but not in the model", left_over);
  if (!problems.empty()) fail_with(folder.path().string() + " does not fit the model", problems);

  for (const string& line: summarize_names(ignored))
    if (launch_info().rank == 0) fmt::print(stderr, "not part of the text model: {}\n", line);
  NoGradGuard no_grad;
  for (const ImportTarget& to: targets) import_tensor(folder, to);
}

vector<WrittenFile> write_weights(
  const fs::path& folder, int64_t writer, const vector<NamedTensor>& weights, uint64_t file_bytes) {
  vector<WrittenFile> written;
  vector<NamedTensor> waiting;
  uint64_t filled = 0;
  const auto write = [&] {
    const auto name = fmt::format("{}{}-{}.safetensors", kUnnumbered, writer, written.size());
    written.push_back(write_safetensors(folder / name, exchange(waiting, {})));
    filled = 0;
  };
  for (const NamedTensor& weight: weights) {
    if (!waiting.empty() && filled + weight.second.nbytes() > file_bytes) write();
    waiting.push_back(weight);
    filled += weight.second.nbytes();
  }
  if (!waiting.empty()) write();
  return written;
}

WrittenFile write_weight_index(
  const fs::path& folder, span<WrittenFile> files, const string& inside) {
  const auto is_weights = [start = inside + string(kUnnumbered)](
                            const auto& file) { return file.name.starts_with(start); };
  const auto count = ranges::count_if(files, is_weights);
  int64_t number = 0;
  uint64_t total = 0;
  json weight_map = json::object();
  for (WrittenFile& file: files) {
    if (!is_weights(file)) continue;
    const auto name = fmt::format("model-{:05}-of-{:05}.safetensors", ++number, count);
    fs::rename(folder / file.name, folder / inside / name);
    file.name = inside + name;
    for (const auto& [tensor, sum]: file.tensors)
      PITH_CHECK(weight_map.emplace(tensor, name).second, "two weights named {}", tensor);
    total += file.bytes - SafetensorsFile(folder / file.name).header().data_offset;
  }
  PITH_CHECK(!weight_map.empty(), "{}: there are no weights to write", folder);
  const json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
  return write_file(folder, inside + kIndex, index.dump(2) + "\n");
}
}
