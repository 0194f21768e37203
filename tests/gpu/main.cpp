// Tests that need a GPU: kernels against the CPU paths of the same operators.
#include <gtest/gtest.h>
#include <cstdio>
#include "core/device.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    std::printf("%s\n", pith::describe_device(pith::select_device("cuda")).c_str());
  } catch (const pith::Error& error) {
    std::fprintf(stderr, "test_gpu: %s\n", error.what());
    return 1;
  }
  return RUN_ALL_TESTS();
}
