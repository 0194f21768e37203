// TensorBoard event files with scalar summaries.
#pragma once
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pith {

// CRC-32C (Castagnoli polynomial, RFC 3720 appendix B.4), and the rotated and shifted form that
// TFRecord files store.
uint32_t crc32c(std::string_view bytes);
uint32_t masked_crc32c(std::string_view bytes);

// One event file: TFRecord frames (length u64, its masked CRC u32, bytes, their masked CRC u32;
// little endian), each holding an Event message (tensorflow/core/util/event.proto).
class TensorBoardWriter {
 public:
  // Makes folder/events.out.tfevents.SECONDS.HOST.PID. Readers drop what older files of the folder
  // hold of steps after `resumed_step`. Throws an Error when the file can't be made.
  TensorBoardWriter(const std::filesystem::path& folder, int64_t resumed_step);
  // Writes one event and flushes it. False once the file can't be written.
  bool scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  bool event(int64_t step, const std::string& content);
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace pith
