// Errors of the CUDA runtime as pith::Error. Light enough for .cu files: no formatting, no ATen.
#pragma once
#include <cuda_runtime_api.h>

#include <source_location>

namespace pith::cuda {

// Throws pith::Error: "<what>: <CUDA's text>" with the caller's file and line (cuda_check.cpp).
[[noreturn]] void fail(cudaError_t error, const char* what, const char* file, unsigned line);

inline void check(cudaError_t error, const char* what, const char* file, unsigned line) {
  if (error != cudaSuccess) fail(error, what, file, line);
}

// After a kernel launch: reports a bad configuration. Faults inside the kernel appear at a later
// call.
inline void launch_check(const char* kernel,
                         std::source_location at = std::source_location::current()) {
  check(cudaGetLastError(), kernel, at.file_name(), at.line());
}

}  // namespace pith::cuda

#define PITH_CUDA_CHECK(call) ::pith::cuda::check((call), #call, __FILE__, __LINE__)
