#include "engine/hf_folder.h"
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <nlohmann/json.hpp>
#include "tests/engine/scratch.h"

namespace pith {
namespace {
using nlohmann::json;

// Known-faults 49 as a checker of its own: only the bytes of the files count.
void check_strictly(const std::filesystem::path& folder) {
  const json index = json::parse(read_file(folder / "model.safetensors.index.json"));
  std::map<std::string, std::string> seen;
  uint64_t total = 0;
  for (const auto& entry: std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string bytes = read_file(entry.path());
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    const json header = json::parse(bytes.substr(8, length));
    EXPECT_EQ(header.at("__metadata__"), json({{"format", "pt"}}));
    std::map<uint64_t, uint64_t> ranges;
    for (const auto& [name, tensor]: header.items()) {
      if (name == "__metadata__") continue;
      EXPECT_TRUE(seen.emplace(name, entry.path().filename()).second);
      uint64_t size = tensor.at("dtype") == "F32" ? 4 : tensor.at("dtype") == "BF16" ? 2 : 0;
      ASSERT_GT(size, 0u);
      for (const uint64_t dimension: tensor.at("shape")) size *= dimension;
      const uint64_t begin = tensor.at("data_offsets")[0], end = tensor.at("data_offsets")[1];
      EXPECT_EQ(end - begin, size);
      total += size;
      ranges[begin] = end;
    }
    uint64_t end = 0;
    for (const auto& [from, to]: ranges) {
      EXPECT_EQ(from, end);
      end = to;
    }
    EXPECT_EQ(8 + length + end, bytes.size());
  }
  EXPECT_EQ(index.at("weight_map"), json(seen));
  EXPECT_EQ(index.at("metadata").at("total_size"), total);
}

std::vector<NamedTensor> weights(int count) {
  std::vector<NamedTensor> result;
  for (int i = 0; i < count; ++i)
    result.emplace_back(fmt::format("layers.{}.w", i), at::randn({5, 3}).to(at::kBFloat16));
  return result;
}

std::vector<WrittenFile> write_hf_weights(const std::filesystem::path& folder,
  const std::vector<NamedTensor>& tensors, uint64_t shard_bytes) {
  auto written = write_weights(folder, 0, tensors, shard_bytes);
  written.push_back(write_weight_index(folder, written));
  return written;
}

TEST(HfFolder, ShardsAreWrittenStrictlyAndReadBack) {
  for (const uint64_t shard_bytes: {1u, 60u, 89u, 90u, 1000u}) {
    const Scratch scratch;
    const auto written = weights(7);
    const auto files = write_hf_weights(scratch.path, written, shard_bytes);
    const size_t per_file = std::max<size_t>(1, shard_bytes / 30);
    EXPECT_EQ(files.size(), (7 + per_file - 1) / per_file + 1);
    for (const WrittenFile& file: files) EXPECT_EQ(file.xxh3, xxh3(read_file(scratch / file.name)));
    check_strictly(scratch.path);
    const HfFolder folder(scratch.path);
    EXPECT_EQ(folder.names().size(), 7u);
    for (const auto& [name, tensor]: written) EXPECT_TRUE(at::equal(folder.tensor(name), tensor));
  }
}

struct Model {
  Parameter fused{
    "qk", {4, 2}, {{"q", {3, 2}, 0}, {"k", {1, 2}, 6}}, ParameterGroup::matrix, Init::normal};
  Parameter norm{"norm", {3}, ParameterGroup::norm, Init::ones};
  std::vector<Tensor> targets{at::full({8}, -1.0f), at::full({3}, -1.0f, at::kBFloat16)};
  std::vector<ImportTarget> imports{{&fused.tensors[0], 0, targets[0].narrow(0, 0, 6)},
    {&fused.tensors[1], 0, targets[0].narrow(0, 6, 2)}, {&norm.tensors[0], 0, targets[1]}};
};

TEST(HfFolder, ImportsIntoFusedParametersConverting) {
  const Scratch scratch;
  const Tensor q = at::randn({3, 2}, at::kDouble), k = at::randn({1, 2}).to(at::kHalf);
  const Tensor norm = at::randn({3});
  write_safetensors(
    scratch / "model.safetensors", {{"q", q}, {"k", k}, {"norm", norm}, {"extra", k}});
  Model model;
  const std::string extra[] = {"extra"};
  import_weights(HfFolder(scratch.path), model.imports, extra);
  EXPECT_TRUE(at::equal(model.targets[0].narrow(0, 0, 6), q.to(at::kFloat).view({6})));
  EXPECT_TRUE(at::equal(model.targets[0].narrow(0, 6, 2), k.to(at::kFloat).view({2})));
  EXPECT_TRUE(at::equal(model.targets[1], norm.to(at::kBFloat16)));
  // A range of a tensor, as a rank of several reads it.
  const ImportTarget middle[] = {{&model.fused.tensors[0], 2, at::full({3}, -1.0f)}};
  const std::string others[] = {"extra", "k", "norm"};
  import_weights(HfFolder(scratch.path), middle, others);
  EXPECT_TRUE(at::equal(middle[0].target, q.to(at::kFloat).view({6}).narrow(0, 2, 3)));
}

TEST(HfFolder, ImportListsEveryProblemAndTouchesNothing) {
  const Scratch scratch;
  write_safetensors(scratch / "model.safetensors",
    {{"q", at::randn({2, 3})}, {"norm", at::zeros({3}, at::kLong)}, {"bias", at::randn({1})}});
  Model model;
  EXPECT_ERROR(import_weights(HfFolder(scratch.path), model.imports), scratch.path.string(),
    "4 problems", "q: shape (2, 3) in the folder, (3, 2) in the model", "missing in the folder: k",
    "norm: dtype int64", "not in the model: bias");
  EXPECT_TRUE(at::equal(model.targets[0], at::full({8}, -1.0f)));
}

TEST(HfFolder, DamagedFoldersNameFileAndTensor) {
  const Scratch scratch;
  const auto folder = scratch / "m";
  const auto fresh = [&] {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directory(folder);
    write_hf_weights(folder, weights(3), 60);
  };
  const std::string one = "model-00001-of-00002.safetensors",
                    two = "model-00002-of-00002.safetensors";
  const std::string index = "model.safetensors.index.json";
  fresh();
  std::filesystem::resize_file(folder / two, std::filesystem::file_size(folder / two) - 1);
  std::filesystem::remove(folder / one);
  EXPECT_ERROR(
    HfFolder{folder}, "2 problems", one, "No such file", two, "tensor layers.2.w ends at byte");
  fresh();
  write_safetensors(folder / two,
    weights(3)); // two of them are in both files, the index says the first
  EXPECT_ERROR(
    HfFolder{folder}, "tensor layers.0.w is in two files", "tensor layers.1.w", one, two);
  fresh();
  write_safetensors(folder / two, {{"ghost.1", at::randn({1})}, {"ghost.2", at::randn({1})}});
  EXPECT_ERROR(HfFolder{folder}, two + " holds a tensor that the index does not list: ghost.1",
    "ghost.2", "the index lists a tensor that " + two + " does not hold: layers.2.w");
  fresh();
  write_safetensors(folder / "model.safetensors", weights(1));
  EXPECT_ERROR(HfFolder{folder}, "both there and disagree");
  put_bytes(folder / index, R"({"weight_map": {"w": "../w.safetensors"}})");
  EXPECT_ERROR(HfFolder{folder}, "w lies in ../w.safetensors, which is not a file name");
  put_bytes(folder / index, "{\n \"weight_map\": {\"a\": \"b\",\n}}");
  EXPECT_ERROR(HfFolder{folder}, index + ": not JSON: parse error at line 3, column 1");
  put_bytes(folder / index, "[]");
  EXPECT_ERROR(HfFolder{folder}, index, "no object weight_map");
  EXPECT_ERROR(HfFolder{scratch.path}, "holds neither");
  EXPECT_ERROR(HfFolder{scratch / "none"}, "not a folder");
}

TEST(HfFolder, JsonErrorsNameLineAndColumn) {
  EXPECT_ERROR(parse_json("{\"a\": 1,\n  \"b\": }", "c.json"),
    "c.json: not JSON: parse error at line 2, column 8");
  EXPECT_ERROR(parse_json("", "c.json"), "c.json", "line 1, column 1");
  EXPECT_ERROR(parse_json(R"({"a": {"b": 1, "b": 2}})", "c.json"), "\"b\" stands twice");
  EXPECT_ERROR(parse_json("1e999", "c.json"), "c.json: not JSON: number overflow");
  EXPECT_ERROR(read_json("/nonexistent/config.json"), "/nonexistent/config.json");
  EXPECT_EQ(parse_json(R"([{"a": 1}, {"a": 2}])", "c.json").size(), 2u);
}

TEST(HfFolder, ManyNamesBecomeOneLine) {
  using Lines = std::vector<std::string>;
  std::vector<std::string> names;
  for (int layer = 0; layer < 3; ++layer)
    for (int expert = 8; expert < 12; ++expert)
      names.push_back(fmt::format("l.{}.e.{}.up", layer, expert));
  EXPECT_EQ(summarize_names(names), Lines{"l.0.e.8.up to l.2.e.11.up (12)"});
  EXPECT_EQ(summarize_names({"a.1", "a.12", "a.3", "b"}), (Lines{"a.1", "a.3", "a.12", "b"}));
  EXPECT_TRUE(summarize_names({}).empty());
}

} // namespace
} // namespace pith
