// The device of this process; LibTorch's CUDA half is loaded only where a GPU is.
#pragma once
#include "core/tensor.h"

namespace pith {
// Before any other LibTorch call. Loads libtorch_cuda.so where build and machine have CUDA.
// `wanted`: "auto", "cpu" or "cuda", which throws, saying why it can't be had.
Device select_device(const string& wanted);
string describe_device(Device device); // a line: name, memory, operators' path
double peak_flops(Device device); // dense BF16, FLOP/s; 0: not known

// Peak so far, GiB, of LibTorch's allocator; on the CPU resident memory.
double peak_memory_gib(Device device);
void synchronize(Device device); // waits for the current stream, not for transfers.
}
