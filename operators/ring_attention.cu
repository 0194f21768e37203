// Merging of what queries get from two parts of their keys: every thread N elements of a row.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

template <class T, int N>
__global__ void merge_kernel(
    T* out, const float* weight, const bf16* part, int64_t elements, int64_t dim) {
  const int64_t at = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * N;
  if (at >= elements) return;
  const float w = weight[at / dim];
  const Vec<bf16, N> other = load<N>(part + at);
  Vec<T, N> sum = load<N>(out + at);
  for (int j = 0; j < N; ++j) {
    const float own = to_float(sum.v[j]);
    sum.v[j] = from_float<T>(own + w * (to_float(other.v[j]) - own));
  }
  store(out + at, sum);
}

}  // namespace

void merge_rows(void* out, const float* weight, const void* part, int64_t rows, int64_t dim,
    bool is_bf16, CUstream_st* stream) {
  if (rows * dim == 0) return;
  with_vectors(is_bf16, {out, part}, {dim}, [&]<class T, int N>() {
    merge_kernel<T, N><<<num_blocks(rows * dim, 256 * N), 256, 0, stream>>>(
        static_cast<T*>(out), weight, static_cast<const bf16*>(part), rows * dim, dim);
  });
  launch_check("merge_rows");
}

}  // namespace pith::cuda
