#include "operators/kernels.h"

#include "core/error.h"

namespace pith::cuda {

void fail(const char* what, const char* error, const char* file, unsigned line) {
  throw Error(file, static_cast<int>(line), what, fmt::format("CUDA: {}", error));
}

}  // namespace pith::cuda
