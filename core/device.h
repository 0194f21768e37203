// Which device this process computes on, and LibTorch's CUDA half loaded only where a GPU is.
#pragma once
#include "core/tensor.h"

namespace pith {

// Must run before any other LibTorch call. Where this build has CUDA and the machine a GPU, loads
// libtorch_cuda.so. `wanted`: "auto", "cpu" or "cuda", which throws, saying why it can't be had.
at::Device select_device(const std::string& wanted);

// One line for the log: device name, memory, which operator path (kernels sm_90a, or reference).
std::string describe_device(at::Device device);

// Peak dense BF16 rate of the device in FLOP/s for MFU, or 0 where it is not known.
double peak_flops(at::Device device);

// GiB in tensors of LibTorch's allocator, now and at the peak; on the CPU resident memory.
struct MemoryUse {
  double current_gib, peak_gib;
};
MemoryUse memory_use(at::Device device);

// Seconds-exact timing needs the device idle: waits for all its work.
void synchronize(at::Device device);

}  // namespace pith
