#include "engine/tensorboard.h"

#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "core/error.h"

namespace pith {
namespace {

// Bytes of a number as it lies in memory, which is the file's order.
static_assert(std::endian::native == std::endian::little);
template <class Number>
std::string raw(Number number) {
  return {reinterpret_cast<const char*>(&number), sizeof(number)};
}

// The pieces of protobuf's wire format that an Event needs: a tag, then a varint, 4 or 8 raw bytes,
// or a length and that many bytes.
enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) bytes += static_cast<char>(value | 128);
  return bytes + static_cast<char>(value);
}
std::string field(uint32_t number, Wire wire, const std::string& value) {
  return varint(number << 3 | wire) + (wire == kBytes ? varint(value.size()) : "") + value;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u;
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder, int64_t resumed_step) {
  std::filesystem::create_directories(folder);
  char host[256] = "host";
  gethostname(host, sizeof(host) - 1);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  path_ = folder / fmt::format("events.out.tfevents.{:010}.{}.{}", seconds, host, getpid());
  file_.open(path_, std::ios::binary | std::ios::app);
  PITH_CHECK(file_.good(), "{}: cannot be written: {}", path_.string(), std::strerror(errno));
  event(0, field(3, kBytes, "brain.Event:2"));  // file_version
  // session_log with status START: what earlier files hold from this step on is void.
  event(resumed_step + 1, field(7, kBytes, field(1, kVarint, varint(1))));
}

bool TensorBoardWriter::scalars(
    int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  std::string summary;
  for (const auto& [tag, value] : values) {
    summary += field(
        1, kBytes, field(1, kBytes, tag) + field(2, kFixed32, raw(static_cast<float>(value))));
  }
  return event(step, field(5, kBytes, summary));
}

bool TensorBoardWriter::event(int64_t step, const std::string& content) {
  const std::chrono::duration<double> time = std::chrono::system_clock::now().time_since_epoch();
  const std::string bytes = field(1, kFixed64, raw(time.count())) +
                            field(2, kVarint, varint(static_cast<uint64_t>(step))) + content;
  const std::string length = raw(uint64_t{bytes.size()});
  file_ << length << raw(masked_crc32c(length)) << bytes << raw(masked_crc32c(bytes)) << std::flush;
  return file_.good() && access(path_.c_str(), W_OK) == 0;  // a deleted file still takes bytes
}

}  // namespace pith
