#include "engine/safetensors.h"
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <nlohmann/json.hpp>
#include "tests/engine/scratch.h"

namespace pith {
namespace {
// A file's bytes from its JSON and data.
std::string file_of(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header + data;
}

SafetensorsHeader parse(const std::string& bytes) {
  return parse_safetensors_header(bytes, bytes.size(), "x.safetensors");
}

TEST(Safetensors, RoundTripOfEveryDtypeAndShape) {
  const Scratch scratch;
  std::vector<NamedTensor> tensors;
  for (const auto dtype: {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble, at::kLong, at::kInt,
         at::kShort, at::kChar, at::kByte})
    tensors.emplace_back(dtype_name(dtype), at::arange(15).reshape({3, 5}).to(dtype));
  tensors.emplace_back("bool", at::ones({3}, at::kBool));
  tensors.emplace_back("scalar \"quoted\" ü", at::ones({}, at::kFloat));
  tensors.emplace_back("empty", at::zeros({0, 7}, at::kFloat));
  tensors.emplace_back("transposed", at::arange(6).reshape({2, 3}).t().to(at::kDouble));
  const WrittenFile written = write_safetensors(scratch / "a.safetensors", tensors);
  EXPECT_EQ(written.xxh3, xxh3(read_file(scratch / "a.safetensors")));
  EXPECT_EQ(written.bytes, std::filesystem::file_size(scratch / "a.safetensors"));
  // Odd sizes before wider dtypes: "transposed" and others lie unaligned and must come back all the
  // same.
  std::unique_ptr<SafetensorsFile> file =
    std::make_unique<SafetensorsFile>(scratch / "a.safetensors");
  EXPECT_EQ(file->header().metadata.at("format"), "pt");
  ASSERT_EQ(file->header().tensors.size(), tensors.size());
  std::vector<Tensor> read;
  for (size_t i = 0; i < tensors.size(); ++i) {
    read.push_back(file->tensor(tensors[i].first));
    EXPECT_EQ(written.tensors.at(tensors[i].first), xxh3(file->bytes(tensors[i].first)));
  }
  file.reset(); // the mapping must outlive the file object
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(read[i].scalar_type(), tensors[i].second.scalar_type());
    EXPECT_TRUE(at::equal(read[i], tensors[i].second)) << tensors[i].first;
  }
  write_safetensors(scratch / "b.safetensors", tensors);
  EXPECT_EQ(read_file(scratch / "a.safetensors"), read_file(scratch / "b.safetensors"));
}

TEST(Safetensors, UnalignedDataAreCopiedNotMisread) {
  const Scratch scratch;
  put_bytes(scratch / "odd.safetensors",
    file_of(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} )", {"\0\0\x80\x3f", 4}));
  EXPECT_EQ(SafetensorsFile(scratch / "odd.safetensors").tensor("w").item<float>(), 1.0f);
}

TEST(Safetensors, EveryViolationNamesFileAndTensor) {
  const std::string eight(8, '\0');
  const auto one = [](const std::string& fields) { return R"({"w":{)" + fields + "}}"; };
  const struct {
    std::string bytes, part;
  } cases[] = {
    {"", "too few"},
    {"1234567", "too few"},
    {std::string("\0\0\0\0\0\1\0\0", 8), "longer than the file"}, // 2^40
    {std::string(8, '\xff'), "longer than the file"},
    {file_of("{", ""), "not JSON"},
    {file_of("[]", ""), "not an object"},
    {file_of("3", ""), "not an object"},
    {file_of(R"({"w":3})", ""), "w: not a dtype"},
    {file_of(R"({"w":[1]})", ""), "w: not a dtype"},
    {file_of("{\"\xff\":{}}", ""), "not JSON"},
    {file_of(one(R"("dtype":"F32","shape":[2])"), eight), "w: not a dtype"},
    {file_of(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1)"), eight),
      "w: not a dtype"},
    {file_of(one(R"("dtype":"F31","shape":[2],"data_offsets":[0,8])"), eight), "dtype F31"},
    {file_of(one(R"("dtype":"","shape":[2],"data_offsets":[0,8])"), eight), "dtype"},
    {file_of(one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), eight), "w: not a dtype"},
    {file_of(one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), eight), "w: not a dtype"},
    {file_of(one(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])"), eight), "w: not a dtype"},
    {file_of(one(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), eight),
      "do not hold float32"},
    {file_of(one(R"("dtype":"F64","shape":[2],"data_offsets":[0,8])"), eight),
      "do not hold float64"},
    {file_of(one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), eight), "do not hold"},
    {file_of(one(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"), eight), "w: not a dtype"},
    {file_of(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,1e99])"), eight), "w: not a dtype"},
    {file_of(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])"), eight), "w: not a dtype"},
    {file_of(one(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8])"), eight),
      "larger than any file"},
    {file_of(one(R"("dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0])"), ""),
      "larger than any file"},
    {file_of(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), eight.substr(1)),
      "tensor w ends at byte 8 of the data, the file holds 7"},
    {file_of(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), eight + "x"),
      "1 bytes of no tensor follow w"},
    {file_of(one(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), eight),
      "4 bytes of no tensor"},
    {file_of(R"({"w":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
             R"("v":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
       eight),
      "tensor v overlaps w"},
    {file_of(R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
             R"("w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
       eight),
      "\"w\" stands twice"},
    {file_of(one(R"("dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8])"), eight),
      "\"dtype\" stands twice"},
    {file_of(R"({"__metadata__":{"format":3}})", ""), "__metadata__ holds more than strings"},
  };
  for (const auto& [bytes, part]: cases) EXPECT_ERROR(parse(bytes), "x.safetensors", part);
  std::string deep = R"({"w":{"dtype":"U8","data_offsets":[0,0],"shape":[)";
  for (int i = 0; i < 100; ++i) deep += "0,";
  EXPECT_ERROR(parse(file_of(deep + "0]}}", "")), "w: not a dtype");
}

TEST(Safetensors, TruncationAtEveryLengthIsAnError) {
  const Scratch scratch;
  write_safetensors(
    scratch / "a", {{"x", at::ones({5}, at::kFloat)}, {"y", at::ones({3}, at::kByte)}});
  const std::string bytes = read_file(scratch / "a");
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_ERROR(parse(bytes.substr(0, size)), "x.safetensors");
}

TEST(Safetensors, WritingRefusesWhatCannotBeRead) {
  const Scratch scratch;
  const Tensor one = at::ones({1});
  EXPECT_ERROR(write_safetensors(scratch / "a", {{"x", one}, {"x", one}}), "two tensors named x");
  EXPECT_ERROR(write_safetensors(scratch / "a", {{"x", Tensor()}}), "x", "undefined");
  EXPECT_ERROR(
    write_safetensors(scratch / "a", {{"x", at::ones({1}, at::kComplexFloat)}}), "no dtype");
  EXPECT_ERROR(write_safetensors(scratch / "none" / "a", {{"x", one}}), "none", "No such file");
  EXPECT_ERROR(write_safetensors("/dev/full", {{"x", one}}), "/dev/full", "No space left");
}

TEST(FileIo, JsonInsideItselfEndsAtADepth) {
  EXPECT_ERROR(parse_json(std::string(1 << 20, '['), "x.json"), "x.json", "64 deep");
  parse_json("[[[[]]]]", "x.json");
}

TEST(FileIo, SealedJsonNoticesEveryChangedByteAndEveryLength) {
  const std::string text = seal_json("{\n \"a\": 1,\n \"b\": {}\n}");
  check_seal(text, "s");
  for (size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = text;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      EXPECT_ERROR(check_seal(changed, "s.json"), "s.json is damaged");
    }
    EXPECT_ERROR(check_seal(text.substr(0, i), "s.json"), "s.json is damaged");
  }
}

} // namespace
} // namespace pith
