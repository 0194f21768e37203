// Which device this process computes on, and LibTorch's CUDA half loaded only where a GPU is.
#pragma once
#include "core/tensor.h"

namespace pith {

// Must run before any other LibTorch call. Loads libtorch_cuda.so where this build has CUDA and the
// machine a GPU. `wanted`: "auto", "cpu" or "cuda", which throws, saying why it can't be had.
at::Device select_device(const std::string& wanted);
std::string describe_device(at::Device device);  // a line: name, memory, which path operators take
double peak_flops(at::Device device);            // dense BF16, FLOP/s; 0: not known

// Peak so far, GiB, of LibTorch's allocator; on the CPU of resident memory.
double peak_memory_gib(at::Device device);
// Waits for what computes, the current stream. Transfers of other streams go on.
void synchronize(at::Device device);

}
