// Which device this process computes on, and LibTorch's CUDA half loaded only where a GPU is.
#pragma once
#include <string>

#include "core/tensor.h"

namespace pith {

// Must run before any other LibTorch call. Where this build has CUDA and the machine a GPU, loads
// libtorch_cuda.so (its operators register themselves); a machine without one needs no CUDA
// libraries. `wanted`: "auto", "cpu" or "cuda". Throws when "cuda" is wanted and can't be had,
// saying why.
at::Device select_device(const std::string& wanted);

// One line for the log: device name, memory, which operator path (kernels sm_90a, or reference).
std::string describe_device(at::Device device);

// Peak dense BF16 rate of the device in FLOP/s for MFU, or 0 where it is not known.
double peak_flops(at::Device device);

// GiB that LibTorch's allocator holds in tensors now and at its peak (CUDA), or resident memory
// (CPU).
struct MemoryUse {
  double current_gib, peak_gib;
};
MemoryUse memory_use(at::Device device);

// Seconds-exact timing needs the device idle: waits for all its work.
void synchronize(at::Device device);

}  // namespace pith
