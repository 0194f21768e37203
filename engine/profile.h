// Profiles of training steps: a Chrome trace, and where the time of the device went.
#pragma once
#include "core/tensor.h"

namespace pith {

// Records with LibTorch's profiler (Kineto) while it lives. The destructor writes, in `folder`,
// trace-rankR.json for chrome://tracing or Perfetto and profile-rankR.txt: per kind and name of
// kernel time and share; how much of the communication ran behind computing, how much alone.
class Profile {
 public:
  Profile(std::filesystem::path folder, int64_t rank, at::Device device);
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;
 private:
  std::filesystem::path folder_;
  int64_t rank_;
  at::Device device_;
};

}  // namespace pith
