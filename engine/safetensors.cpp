#include "engine/safetensors.h"
#include <ATen/ops/from_blob.h>
#include <nlohmann/json.hpp>

namespace pith {
namespace {
using nlohmann::json;

constexpr uint64_t kLargestHeader = 100'000'000; // of the format's reference implementation
constexpr size_t kMostDimensions = 64;

constexpr pair<string_view, ScalarType> kDtypes[] = {{"BF16", kBFloat16}, {"F16", kHalf},
  {"F32", kFloat}, {"F64", kDouble}, {"I64", kLong}, {"I32", kInt}, {"I16", at::kShort},
  {"I8", at::kChar}, {"U8", kByte}, {"F8_E4M3", at::kFloat8_e4m3fn}, {"BOOL", kBool},
  {"F8_E5M2", at::kFloat8_e5m2}};

struct StoredEntry {
  string dtype;
  vector<int64_t> shape;
  array<int64_t, 2> data_offsets{};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StoredEntry, dtype, shape, data_offsets)

// A fraction may be outside the integers that it would be converted to.
bool holds_fraction(const json& value) {
  return value.is_number_float() ||
    (value.is_structured() && ranges::any_of(value, holds_fraction));
}

TensorEntry parse_entry(const json& object, const string& place) {
  const auto stored = holds_fraction(object) ? nullopt : exactly<StoredEntry>(object);
  PITH_CHECK(stored && stored->shape.size() <= kMostDimensions && stored->data_offsets[0] >= 0 &&
      ranges::all_of(stored->shape, [](int64_t size) { return size >= 0; }),
    "{}: not a dtype, a shape of at most {} dimensions and a pair of data_offsets: {:.200}", place,
    kMostDimensions, object.dump());
  const auto* dtype = ranges::find(kDtypes, stored->dtype, [](auto& known) { return known.first; });
  PITH_CHECK(dtype != std::end(kDtypes), "{}: dtype {:.32} is not known", place, stored->dtype);
  TensorEntry entry{dtype->second, stored->shape, uint64_t(stored->data_offsets[0]),
    uint64_t(stored->data_offsets[1])};
  // Zero-sized dimensions do not hide an overflow in the others: strides are computed from them.
  auto product = int64_t(c10::elementSize(entry.dtype));
  bool overflow = false;
  for (const int64_t n: entry.shape)
    overflow |= __builtin_mul_overflow(product, max<int64_t>(n, 1), &product);
  PITH_CHECK(
    !overflow, "{}: shape {} is larger than any file", place, fmt::join(entry.shape, ", "));
  const auto size = ranges::count(entry.shape, 0) > 0 ? 0 : uint64_t(product);
  PITH_CHECK(entry.end >= entry.begin && entry.end - entry.begin == size,
    "{}: bytes {} to {} do not hold {} of shape ({}), {} bytes", place, entry.begin, entry.end,
    dtype_name(entry.dtype), fmt::join(entry.shape, ", "), size);
  return entry;
}

// The data section must be covered exactly: no overlap, no gap, nothing after the last tensor.
void check_layout(const SafetensorsHeader& header, uint64_t data_bytes, const string& source) {
  vector<std::tuple<uint64_t, uint64_t, string_view>> order;
  for (const auto& [name, entry]: header.tensors) order.emplace_back(entry.begin, entry.end, name);
  std::sort(order.begin(), order.end());
  uint64_t filled = 0;
  string_view previous = "the header";
  for (const auto& [begin, end, name]: order) {
    if (end > data_bytes)
      PITH_FAIL_HINT("the file is cut short: copy or download it again",
        "{}: tensor {} ends at byte {} of the data, the file holds {}", source, name, end,
        data_bytes);
    PITH_CHECK(begin >= filled, "{}: tensor {} overlaps {}", source, name, previous);
    PITH_CHECK(begin == filled, "{}: {} bytes of no tensor lie between {} and tensor {}", source,
      begin - filled, previous, name);
    filled = end;
    previous = name;
  }
  PITH_CHECK(filled == data_bytes, "{}: {} bytes of no tensor follow {}", source,
    data_bytes - filled, previous);
}
}

SafetensorsHeader parse_safetensors_header(
  string_view head, uint64_t file_size, const string& source) {
  PITH_CHECK(head.size() >= 8 && file_size >= head.size(),
    "{}: {} bytes are too few for a safetensors file", source, file_size);
  const auto length = load<uint64_t>(&head.front());
  PITH_CHECK(length <= min(head.size() - 8, kLargestHeader),
    "{}: the header of {} bytes is longer than the file of {}, or than the format allows", source,
    length, file_size);
  const json document = parse_json(head.substr(8, length), source + ": header");
  PITH_CHECK(document.is_object(), "{}: the header is not an object of tensors", source);
  SafetensorsHeader header;
  header.data_offset = 8 + length;
  for (const auto& [name, value]: document.items()) {
    if (name != "__metadata__")
      header.tensors.emplace(name, parse_entry(value, fmt::format("{}: tensor {}", source, name)));
  }
  const auto metadata =
    exactly<map<string, string>>(document.value("__metadata__", json::object()));
  PITH_CHECK(metadata, "{}: __metadata__ holds more than strings", source);
  header.metadata = *metadata;
  check_layout(header, file_size - header.data_offset, source);
  return header;
}

SafetensorsFile::SafetensorsFile(const fs::path& path)
    : path_(path), file_(map_file(path)),
      header_(parse_safetensors_header(file_.bytes(), file_.size, path.string())) {}

string_view SafetensorsFile::bytes(const string& name) const {
  const auto found = header_.tensors.find(name);
  PITH_CHECK(found != header_.tensors.end(), "{}: there is no tensor {}", path_, name);
  const TensorEntry& entry = found->second;
  return file_.bytes().substr(header_.data_offset + entry.begin, entry.end - entry.begin);
}

Tensor SafetensorsFile::tensor(const string& name) const {
  const string_view data = bytes(name);
  const TensorEntry& entry = header_.tensors.at(name);
  const auto options = TensorOptions().dtype(entry.dtype);
  // The format does not align data. ATen reads through typed pointers, so such a tensor is copied.
  if (data.empty() ||
    reinterpret_cast<uintptr_t>(data.data()) % c10::elementSize(entry.dtype) != 0) {
    Tensor copy = at::empty(entry.shape, options);
    std::copy(data.begin(), data.end(), static_cast<char*>(copy.data_ptr()));
    return copy;
  }
  auto keep = [mapping = file_.data](void*) {};
  return at::from_blob(const_cast<char*>(data.data()), entry.shape, keep, options);
}

WrittenFile write_safetensors(const fs::path& path, const vector<NamedTensor>& tensors) {
  // Written as text: the order of the tensors is the caller's.
  string header = R"({"__metadata__":{"format":"pt"})";
  set<string_view> names;
  uint64_t offset = 0;
  for (const auto& [name, tensor]: tensors) {
    PITH_CHECK(tensor.defined() && tensor.is_cpu(), "{}: tensor {} is not on the CPU: {}", path,
      name, describe(tensor, name));
    PITH_CHECK(name != "__metadata__" && names.insert(name).second,
      "{}: two tensors named {}, or a reserved name", path, name);
    const auto* dtype =
      ranges::find(kDtypes, tensor.scalar_type(), [](const auto& known) { return known.second; });
    PITH_CHECK(
      dtype != std::end(kDtypes), "safetensors has no dtype for {}", describe(tensor, name));
    const auto bytes = uint64_t(tensor.numel()) * tensor.element_size();
    header += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
      json(name).dump(), dtype->first, fmt::join(tensor.sizes(), ","), offset, offset + bytes);
    offset += bytes;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' '); // the data section starts aligned
  PITH_CHECK(header.size() <= kLargestHeader, "{}: {} tensors are too many for one file", path,
    tensors.size());
  OutputFile out(path);
  out.append(raw(uint64_t{header.size()}) + header);
  WrittenFile written{path.filename().string(), 0, "", {}};
  for (const auto& [name, tensor]: tensors) {
    const Tensor dense = tensor.contiguous();
    const string_view bytes(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
    out.append(bytes);
    written.tensors.emplace(name, xxh3(bytes));
  }
  written.bytes = out.bytes();
  written.xxh3 = out.close();
  return written;
}
}
