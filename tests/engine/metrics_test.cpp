#include "engine/metrics.h"
#include <gtest/gtest.h>
#include <unistd.h>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include "core/error.h"

namespace pith {
namespace {
namespace fs = std::filesystem;
using Json = nlohmann::json;

class Metrics : public testing::Test {
 protected:
  fs::path folder_ = fs::temp_directory_path() / fmt::format("pith metrics ü {}", getpid());
  void SetUp() override { fs::remove_all(folder_); }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path file() const { return folder_ / "metrics.jsonl"; }
  std::vector<Json> lines() const {
    std::ifstream stream(file());
    std::vector<Json> result;
    for (std::string line; std::getline(stream, line);) result.push_back(Json::parse(line));
    return result;
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> result;
    for (const Json& line: lines()) {
      if (line.contains("step")) result.push_back(line["step"]);
    }
    return result;
  }
};

StepMetrics step(int64_t number) {
  StepMetrics m;
  m.step = number;
  m.total_steps = 1000;
  m.loss = 4.12341;
  m.balance_loss = 1.01;
  m.grad_norm = 1.2345;
  m.lr = 0.1 + 0.2;
  m.tokens = 1024;
  m.trained_tokens = 1000;
  m.tokens_seen = 1024 * number;
  m.seconds = 0.5;
  m.memory_peak_gib = 94.13;
  return m;
}

std::string read(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST_F(Metrics, LinesAreJsonWhateverTheyHold) {
  MetricsLog log(folder_, 0, false);
  StepMetrics m = step(1);
  m.extra = {{"validation/loss", 3.5}};
  log.write(m);
  m = step(2);
  m.loss = std::nan("");
  m.grad_norm = std::numeric_limits<double>::infinity();
  m.extra = {{"validation/loss", -std::numeric_limits<double>::infinity()}};
  log.write(m);
  const std::string text = "quote \" backslash \\ newline \n tab \t ü 模 \x01 bad \xff";
  log.event("save", text);
  const auto all = lines();
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0]["step"], 1);
  EXPECT_EQ(all[0]["lr"].get<double>(), 0.1 + 0.2); // to the last bit
  EXPECT_EQ(all[0]["tokens_per_second"], 2048);
  EXPECT_EQ(all[0]["tokens_seen"], 1024);
  EXPECT_TRUE(all[0]["mfu"].is_null());
  EXPECT_FALSE(all[0].contains("nonfinite"));
  EXPECT_EQ(all[0]["validation/loss"], 3.5);
  EXPECT_TRUE(all[1]["loss"].is_null());
  EXPECT_EQ(all[1]["nonfinite"]["loss"], "nan");
  EXPECT_EQ(all[1]["nonfinite"]["grad_norm"], "inf");
  EXPECT_EQ(all[1]["nonfinite"]["validation/loss"], "-inf");
  EXPECT_EQ(all[2]["event"], "save");
  EXPECT_EQ(all[2]["after_step"], 2);
  EXPECT_EQ(all[2]["text"], text.substr(0, text.size() - 1) + "\xEF\xBF\xBD");
}

TEST_F(Metrics, EachLineIsThereAtOnce) {
  MetricsLog log(folder_, 0, false);
  for (int64_t i = 1; i <= 3; ++i) {
    log.write(step(i));
    EXPECT_EQ(steps().size(), static_cast<size_t>(i));
  }
}

TEST_F(Metrics, ResumeCutsLaterStepsAndHalfLines) {
  {
    MetricsLog log(folder_, 0, false);
    for (int64_t i = 1; i <= 5; ++i) log.write(step(i));
    log.event("save", "of step 5");
    for (int64_t i = 6; i <= 8; ++i) log.write(step(i));
    log.event("stop", "killed");
  }
  const std::string whole = read(file());
  { MetricsLog log(folder_, 8, false); }
  EXPECT_EQ(read(file()), whole);
  std::ofstream(file(), std::ios::app) << R"({"step": 9, "loss": 4.)";
  { MetricsLog log(folder_, 8, false); }
  EXPECT_EQ(read(file()), whole); // the half line is gone
  {
    MetricsLog log(folder_, 5, false);
    log.write(step(6));
  }
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(lines()[5]["event"], "save"); // stood before step 6
  EXPECT_EQ(lines().size(), 7u);
  { MetricsLog log(folder_, 0, false); }
  EXPECT_EQ(read(file()), "");
}

TEST_F(Metrics, DamagedLinesInTheMiddleDoNotStopAResume) {
  fs::create_directories(folder_);
  std::ofstream(file(), std::ios::binary) << "{\"step\": 1}\n\n[1]\nnonsense\n{\"step\": 2}\n"
                                          << "{\"step\": 3}\n";
  { MetricsLog log(folder_, 2, false); }
  EXPECT_EQ(read(file()), "{\"step\": 1}\n\n[1]\nnonsense\n{\"step\": 2}\n");
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

TEST_F(Metrics, SinksThatFailAreReportedOnceAndLeftOut) {
  // The run folder lies under a file.
  std::ofstream(folder_) << "x";
  testing::internal::CaptureStderr();
  {
    MetricsLog log(folder_ / "run", 0, true);
    for (int64_t i = 1; i <= 3; ++i) log.write(step(i));
  }
  std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(count(said, "training goes on without metrics.jsonl"), 1u) << said;
  EXPECT_EQ(count(said, "training goes on without TensorBoard files"), 1u) << said;
  fs::remove(folder_);

  // The disk is full.
  fs::create_directories(folder_);
  fs::create_symlink("/dev/full", file());
  testing::internal::CaptureStderr();
  {
    MetricsLog log(folder_, 0, false);
    for (int64_t i = 1; i <= 3; ++i) log.write(step(i));
  }
  said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(count(said, "warning"), 1u) << said;
  fs::remove_all(folder_);

  // The folder disappears during the run.
  testing::internal::CaptureStderr();
  {
    MetricsLog log(folder_, 0, true);
    log.write(step(1));
    fs::remove_all(folder_);
    for (int64_t i = 2; i <= 4; ++i) log.write(step(i));
    log.event("stop", "end");
  }
  said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(count(said, "metrics.jsonl was removed"), 1u) << said;
  EXPECT_EQ(count(said, "warning"), 2u) << said;
}

TEST(ProgressLine, IsAlignedAndHuman) {
  StepMetrics m = step(20);
  m.mfu = 0.31;
  EXPECT_EQ(progress_line(m, 3723),
    "step   20/1000  loss  4.1234  grad  1.234  lr 3.00e-01  2.05k tok/s  mfu 31.0 %  "
    "mem  94.1 GiB  left 1h02m");
  m.step = 999;
  m.mfu = 0;
  m.seconds = 0.0001;
  m.loss = std::nan("");
  m.grad_norm = 123456;
  EXPECT_EQ(progress_line(m, -1),
    "step  999/1000  loss     nan  grad 1.235e+05  lr 3.00e-01  10.2M tok/s  mem  94.1 GiB");
  m.seconds = 0;
  m.grad_norm = 0.01234567;
  EXPECT_EQ(progress_line(m, 0),
    "step  999/1000  loss     nan  grad 0.01235  lr 3.00e-01      0 tok/s  mem  94.1 GiB  "
    "left 0s");
  for (const auto& [seconds, text]: std::vector<std::pair<double, std::string>>{
         {59.4, "59s"}, {59.6, "1m00s"}, {3599, "59m59s"}, {86399, "23h59m"}, {90000, "1d01h"}}) {
    EXPECT_TRUE(progress_line(m, seconds).ends_with("left " + text)) << text;
  }
}

// One slow step (the first, a save) does not change the forecast: it takes the median.
TEST_F(Metrics, TimeLeftFromTheMedian) {
  testing::internal::CaptureStdout();
  {
    MetricsLog log(folder_, 0, false);
    for (int64_t i = 1; i <= 5; ++i) {
      StepMetrics m = step(i);
      m.total_steps = 105;
      m.seconds = i == 2 ? 1 : i == 5 ? 60 : 0.1 * static_cast<double>(i);
      log.write(m);
    }
  }
  const std::string said = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(said.ends_with("left 40s\n")) << said;
}

TEST(TensorBoard, Crc32cOfKnownVectors) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu); // RFC 3720 B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u); // RFC 3720 B.4
  EXPECT_EQ(masked_crc32c(std::string(8, '\0')),
    ((crc32c(std::string(8, '\0')) >> 15 | crc32c(std::string(8, '\0')) << 17) + 0xa282ead8u));
}

// Events of a file: frames checked, payloads returned.
std::vector<std::string> frames(const std::string& bytes) {
  std::vector<std::string> payloads;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t length = 0;
    uint32_t length_crc = 0, payload_crc = 0;
    EXPECT_LE(at + 16, bytes.size());
    std::memcpy(&length, &bytes[at], 8);
    std::memcpy(&length_crc, &bytes[at + 8], 4);
    EXPECT_EQ(length_crc, masked_crc32c(bytes.substr(at, 8)));
    payloads.push_back(bytes.substr(at + 12, length));
    std::memcpy(&payload_crc, &bytes[at + 12 + length], 4);
    EXPECT_EQ(payload_crc, masked_crc32c(payloads.back()));
    at += 16 + length;
  }
  return payloads;
}

TEST_F(Metrics, TensorBoardEventsReadBack) {
  { MetricsLog log(folder_, 7, true); }
  fs::path path;
  for (const auto& entry: fs::directory_iterator(folder_ / "tensorboard")) path = entry.path();
  EXPECT_TRUE(path.filename().string().starts_with("events.out.tfevents."));
  const auto payloads = frames(read(path) + tensorboard_scalars(300, {{"a", 1.5}, {"b/ü", -2}}));
  ASSERT_EQ(payloads.size(), 3u);
  const auto after_time = [&](size_t i) { return payloads[i].substr(9); };
  for (const std::string& payload: payloads) EXPECT_EQ(payload[0], '\x09'); // wall_time
  EXPECT_EQ(after_time(0), std::string("\x10\x00\x1A\x0D", 4) + "brain.Event:2");
  EXPECT_EQ(after_time(1), std::string("\x10\x08\x3A\x02\x08\x01")); // step 8, START
  EXPECT_EQ(after_time(2),
    std::string("\x10\xAC\x02\x2A\x17" // step 300, summary
                "\x0A\x08\x0A\x01"
                "a\x15\x00\x00\xC0\x3F" // a = 1.5
                "\x0A\x0B\x0A\x04"
                "b/ü\x15\x00\x00\x00\xC0", // b/ü = -2
      28));
}

} // namespace
} // namespace pith
