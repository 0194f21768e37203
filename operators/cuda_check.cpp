#if PITH_CUDA
#include "operators/cuda_check.h"

#include "core/error.h"

namespace pith::cuda {

void fail(cudaError_t error, const char* what, const char* file, unsigned line) {
  throw Error(file, static_cast<int>(line), what,
              fmt::format("CUDA: {} ({})", cudaGetErrorString(error), cudaGetErrorName(error)));
}

}  // namespace pith::cuda
#endif
