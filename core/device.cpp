#include "core/device.h"
#include <ATen/Context.h>
#include <sys/resource.h>
#include "core/comm.h"

#if PITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#endif

namespace pith {
namespace {
#if PITH_CUDA
cudaDeviceProp properties_of(Device device) {
  cudaDeviceProp properties;
  PITH_CHECK(cudaGetDeviceProperties(&properties, device.index()) == cudaSuccess,
    "the GPU's properties cannot be read");
  return properties;
}

// Empty when a GPU can be used, else why not.
string load_cuda() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  if (count == 0) return "no GPU on this machine";
  // RTLD_GLOBAL: cuDNN and registration of operators look for each other's symbols.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) return dlerror();
  return "";
}
#else
string load_cuda() { return "this program was built without CUDA (no nvcc was found)"; }
#endif
}

Device select_device(const string& wanted) {
  if (wanted == "cpu") return kCPU;
  PITH_CHECK(
    wanted == "auto" || wanted == "cuda", "unknown device '{}': auto, cpu or cuda", wanted);
  static const string problem = load_cuda();
  if (problem.empty()) {
    // Sums of a split product: FP32, rounded once, not BF16 (LibTorch's default).
    at::globalContext().setAllowBF16ReductionCuBLAS(false);
#if PITH_CUDA
    int count = 1; // each process here takes its own GPU
    cudaGetDeviceCount(&count);
    const auto index = int(launch_info().local_rank % count);
    PITH_CHECK(cudaSetDevice(index) == cudaSuccess, "GPU {} cannot be used", index);
    return Device(kCUDA, static_cast<at::DeviceIndex>(index));
#endif
  }
  if (wanted == "cuda")
    PITH_FAIL_HINT(
      "use --set run.device=cpu, or check the driver and that LibTorch's CUDA libraries are "
      "on LD_LIBRARY_PATH (./pith setup --cuda)",
      "device 'cuda' was asked for but cannot be used: {}", problem);
  return kCPU;
}

string describe_device(Device device) {
#if PITH_CUDA
  if (device.is_cuda()) {
    const cudaDeviceProp properties = properties_of(device);
    return fmt::format("{}, {:.0f} GiB, compute capability {}.{}; own kernels, cuBLAS, cuDNN",
      properties.name, real(properties.totalGlobalMem) / (1 << 30), properties.major,
      properties.minor);
  }
#endif
  return device.is_cpu() ? "CPU; reference operators (ATen)" : device.str();
}

double peak_flops([[maybe_unused]] Device device) {
#if PITH_CUDA
  if (device.is_cuda()) {
    const string name = properties_of(device).name;
    // Datasheets, SXM parts.
    if (name.find("H200") != name.npos || name.find("H100") != name.npos) return 989e12;
    if (name.find("B200") != name.npos) return 2250e12;
  }
#endif
  return 0;
}

double peak_memory_gib([[maybe_unused]] Device device) {
#if PITH_CUDA
  if (device.is_cuda()) {
    constexpr auto kAll = size_t(c10::CachingAllocator::StatType::AGGREGATE);
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
    return real(stats.allocated_bytes[kAll].peak) / (1 << 30);
  }
#endif
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return real(usage.ru_maxrss) / (1 << 20);
}

void synchronize([[maybe_unused]] Device device) {
#if PITH_CUDA
  if (device.is_cuda())
    PITH_CHECK(
      cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(device.index())) == cudaSuccess,
      "the GPU reports an error: {}", cudaGetErrorString(cudaGetLastError()));
#endif
}
}
