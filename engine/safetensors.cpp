#include "engine/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

namespace pith {
namespace {

using nlohmann::json;

constexpr uint64_t kLargestHeader =
    100'000'000;  // the limit of the format's reference implementation
constexpr size_t kMostDimensions = 64;

constexpr std::pair<std::string_view, at::ScalarType> kDtypes[] = {
    {"BF16", at::kBFloat16},
    {"F16", at::kHalf},
    {"F32", at::kFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
};

std::optional<at::ScalarType> dtype_from(std::string_view name) {
  for (const auto& [text, dtype] : kDtypes)
    if (text == name) return dtype;
  return std::nullopt;
}

// Bytes of a dense tensor. Zero-sized dimensions do not hide an overflow in the others: strides are
// computed from them.
uint64_t byte_size(const TensorEntry& entry, const std::string& source, const std::string& name) {
  uint64_t product = c10::elementSize(entry.dtype);
  bool empty = false, overflow = false;
  for (int64_t size : entry.shape) {
    empty |= size == 0;
    overflow |= __builtin_mul_overflow(product, static_cast<uint64_t>(std::max<int64_t>(size, 1)),
                                       &product);
  }
  PITH_CHECK(!overflow && product <= INT64_MAX, "{}: tensor {}: shape {} is larger than any file",
             source, name, fmt::join(entry.shape, ", "));
  return empty ? 0 : product;
}

uint64_t unsigned_value(const json& value, const std::string& source, const std::string& name,
                        const char* field) {
  PITH_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX,
             "{}: tensor {}: {} must hold integers from 0 to 2^63 - 1", source, name, field);
  return value.get<uint64_t>();
}

TensorEntry parse_entry(const json& object, const std::string& source, const std::string& name) {
  for (const char* field : {"dtype", "shape", "data_offsets"})
    PITH_CHECK(object.contains(field), "{}: tensor {}: {} is missing", source, name, field);
  PITH_CHECK(object.size() == 3, "{}: tensor {}: fields besides dtype, shape, data_offsets", source,
             name);
  const json &dtype = object["dtype"], &shape = object["shape"], &range = object["data_offsets"];
  PITH_CHECK(dtype.is_string(), "{}: tensor {}: dtype is not a string", source, name);
  const auto type = dtype_from(dtype.get_ref<const std::string&>());
  PITH_CHECK(type, "{}: tensor {}: dtype {:.32} is not known", source, name,
             dtype.get_ref<const std::string&>());
  PITH_CHECK(shape.is_array(), "{}: tensor {}: shape is not an array", source, name);
  PITH_CHECK(range.is_array() && range.size() == 2, "{}: tensor {}: data_offsets is not a pair",
             source, name);
  TensorEntry entry{*type, {}, 0, 0};
  for (const json& size : shape)
    entry.shape.push_back(static_cast<int64_t>(unsigned_value(size, source, name, "shape")));
  entry.begin = unsigned_value(range[0], source, name, "data_offsets");
  entry.end = unsigned_value(range[1], source, name, "data_offsets");
  const uint64_t size = byte_size(entry, source, name);
  PITH_CHECK(entry.end >= entry.begin && entry.end - entry.begin == size,
             "{}: tensor {}: bytes {} to {} do not hold {} of shape ({}), {} bytes", source, name,
             entry.begin, entry.end, dtype_name(*type), fmt::join(entry.shape, ", "), size);
  return entry;
}

// Each entry is converted when its closing brace is read and dropped from the document, so hostile
// headers cost no more memory than their tensors do. Values deeper than the format has them end the
// parse.
class HeaderReader {
 public:
  HeaderReader(SafetensorsHeader& header, const std::string& source)
      : header_(header), source_(source) {}

  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      PITH_CHECK(event == Event::object_start ? depth <= 1 : depth == 2,
                 "{}: the header is not an object of tensors (near {})", source_, name_);
      elements_ = 0;
    } else if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (depth == 1) {
        name_ = key;
        PITH_CHECK(names_.insert(key).second, "{}: tensor {} is there twice", source_, key);
        fields_.clear();
      } else {
        PITH_CHECK(fields_.insert(key).second, "{}: tensor {}: {:.32} is there twice", source_,
                   name_, key);
      }
    } else if (event == Event::value) {
      PITH_CHECK(depth >= 2, "{}: {:.200} is not an object", source_, name_);
      PITH_CHECK(depth != 3 || ++elements_ <= kMostDimensions,
                 "{}: tensor {}: more than {} dimensions", source_, name_, kMostDimensions);
    } else if (event == Event::object_end && depth == 1) {
      if (name_ != "__metadata__") {
        header_.tensors.emplace(name_, parse_entry(parsed, source_, name_));
        return false;
      }
      for (const auto& [key, value] : parsed.items()) {
        PITH_CHECK(value.is_string(), "{}: __metadata__: {} is not a string", source_, key);
        header_.metadata.emplace(key, value.get<std::string>());
      }
      return false;
    }
    return true;
  }

 private:
  SafetensorsHeader& header_;
  const std::string& source_;
  std::string name_;
  std::set<std::string> names_, fields_;
  size_t elements_ = 0;
};

// The data section must be covered exactly: no overlap, no gap, nothing after the last tensor.
void check_layout(const SafetensorsHeader& header, uint64_t data_bytes, const std::string& source) {
  std::vector<std::pair<const std::string*, const TensorEntry*>> order;
  order.reserve(header.tensors.size());
  for (const auto& [name, entry] : header.tensors) order.emplace_back(&name, &entry);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
  });
  uint64_t end = 0;
  std::string_view previous = "the header";
  for (const auto& [name, entry] : order) {
    if (entry->end > data_bytes)
      PITH_FAIL_HINT("the file is cut short: copy or download it again",
                     "{}: tensor {} ends at byte {} of the data, the file holds {}", source, *name,
                     entry->end, data_bytes);
    PITH_CHECK(entry->begin >= end, "{}: tensor {} overlaps {}", source, *name, previous);
    PITH_CHECK(entry->begin == end, "{}: {} bytes of no tensor lie between {} and tensor {}",
               source, entry->begin - end, previous, *name);
    end = entry->end;
    previous = *name;
  }
  PITH_CHECK(end == data_bytes, "{}: {} bytes of no tensor follow {}", source, data_bytes - end,
             previous);
}

}  // namespace

std::string safetensors_dtype(at::ScalarType dtype) {
  for (const auto& [text, type] : kDtypes)
    if (type == dtype) return std::string(text);
  PITH_FAIL("safetensors has no dtype for {}", dtype_name(dtype));
}

SafetensorsHeader parse_safetensors_header(std::string_view head, uint64_t file_size,
                                           const std::string& source) {
  PITH_CHECK(head.size() >= 8 && file_size >= head.size(),
             "{}: {} bytes are too few for a safetensors file", source, file_size);
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = length << 8 | static_cast<uint8_t>(head[i]);
  PITH_CHECK(length <= file_size - 8, "{}: the header of {} bytes is longer than the file of {}",
             source, length, file_size);
  PITH_CHECK(length <= kLargestHeader, "{}: a header of {} bytes is longer than the format allows",
             source, length);
  PITH_CHECK(length <= head.size() - 8, "{}: only {} of the header's {} bytes were given", source,
             head.size() - 8, length);
  SafetensorsHeader header;
  header.data_offset = 8 + length;
  try {
    // What is left of the document is empty: the reader takes every member out of it.
    [[maybe_unused]] const json rest =
        json::parse(head.substr(8, length), HeaderReader(header, source));
  } catch (const json::exception& error) {
    PITH_FAIL("{}: the header is not JSON: {:.300}", source, error.what());
  }
  check_layout(header, file_size - header.data_offset, source);
  return header;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path),
      file_(map_file(path)),
      header_(parse_safetensors_header(file_.bytes(), file_.size, path.string())) {}

std::string_view SafetensorsFile::bytes(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  PITH_CHECK(found != header_.tensors.end(), "{}: there is no tensor {}", path_.string(), name);
  const TensorEntry& entry = found->second;
  return file_.bytes().substr(header_.data_offset + entry.begin, entry.end - entry.begin);
}

Tensor SafetensorsFile::tensor(const std::string& name) const {
  const std::string_view data = bytes(name);
  const TensorEntry& entry = header_.tensors.at(name);
  const auto options = at::TensorOptions().dtype(entry.dtype);
  if (data.empty()) return at::empty(entry.shape, options);
  // The format does not align data. ATen reads through typed pointers, so such a tensor is copied.
  if (reinterpret_cast<uintptr_t>(data.data()) % c10::elementSize(entry.dtype) != 0) {
    Tensor copy = at::empty(entry.shape, options);
    std::copy(data.begin(), data.end(), static_cast<char*>(copy.data_ptr()));
    return copy;
  }
  auto keep = [mapping = file_.data](void*) {};
  return at::from_blob(const_cast<char*>(data.data()), entry.shape, keep, options);
}

WrittenFile write_safetensors(const std::filesystem::path& path,
                              const std::vector<NamedTensor>& tensors) {
  // Written as text: the order of the tensors is the caller's, and names are escaped by the
  // library.
  std::string header = R"({"__metadata__":{"format":"pt"})";
  std::set<std::string_view> names;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    PITH_CHECK(tensor.defined() && tensor.is_cpu(), "{}: tensor {} is not on the CPU: {}",
               path.string(), name, describe(tensor, name));
    PITH_CHECK(name != "__metadata__" && names.insert(name).second,
               "{}: two tensors named {}, or a reserved name", path.string(), name);
    const auto bytes = static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
    header += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                          json(name).dump(), safetensors_dtype(tensor.scalar_type()),
                          fmt::join(tensor.sizes(), ","), offset, offset + bytes);
    offset += bytes;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');  // the data section starts aligned
  PITH_CHECK(header.size() <= kLargestHeader, "{}: {} tensors are too many for one file",
             path.string(), tensors.size());
  OutputFile out(path);
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  out.append(length);
  out.append(header);
  WrittenFile written{path.filename().string(), 0, 0, {}};
  for (const auto& [name, tensor] : tensors) {
    const Tensor dense = tensor.contiguous();
    const std::string_view bytes(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
    out.append(bytes);
    written.tensors.emplace_back(name, xxh3(bytes));
  }
  written.bytes = out.bytes();
  written.xxh3 = out.close();
  return written;
}

}  // namespace pith
