// SwiGLU forward and backward: one pass each, bound by memory.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

// Fast forms, relative error about 1e-6: exact ones would take as long as the memory.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <class T, int N>
__global__ void forward_kernel(const T* gate_up, T* y, int64_t rows, int64_t width) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * N;
  if (row >= rows || column >= width) return;
  const Vec<T, N> gate = load<N>(gate_up + 2 * row * width + column);
  const Vec<T, N> up = load<N>(gate_up + (2 * row + 1) * width + column);
  Vec<T, N> out;
  for (int j = 0; j < N; ++j) {
    const float g = to_float(gate.v[j]);
    out.v[j] = from_float<T>(g * sigmoid(g) * to_float(up.v[j]));
  }
  store(y + row * width + column, out);
}

template <class T, int N>
__global__ void backward_kernel(
    const T* gate_up, const T* dy, T* dgate_up, int64_t rows, int64_t width) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * N;
  if (row >= rows || column >= width) return;
  const int64_t at_gate = 2 * row * width + column, at_up = at_gate + width;
  const Vec<T, N> gate = load<N>(gate_up + at_gate), up = load<N>(gate_up + at_up);
  const Vec<T, N> dout = load<N>(dy + row * width + column);
  Vec<T, N> dgate, dup;
  for (int j = 0; j < N; ++j) {
    const float g = to_float(gate.v[j]), d = to_float(dout.v[j]), s = sigmoid(g);
    dgate.v[j] = from_float<T>(d * to_float(up.v[j]) * s * (1.0f + g * (1.0f - s)));
    dup.v[j] = from_float<T>(d * g * s);
  }
  store(dgate_up + at_gate, dgate);
  store(dgate_up + at_up, dup);
}

}  // namespace

void swiglu_forward(
    const void* gate_up, void* y, int64_t rows, int64_t width, bool is_bf16, CUstream_st* stream) {
  if (rows * width == 0) return;
  with_vectors(is_bf16, {gate_up, y}, {width}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, width / N);
    forward_kernel<T, N><<<shape.grid, shape.block, 0, stream>>>(
        static_cast<const T*>(gate_up), static_cast<T*>(y), rows, width);
  });
  launch_check("swiglu forward");
}

void swiglu_backward(const void* gate_up, const void* dy, void* dgate_up, int64_t rows,
    int64_t width, bool is_bf16, CUstream_st* stream) {
  if (rows * width == 0) return;
  with_vectors(is_bf16, {gate_up, dy, dgate_up}, {width}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, width / N);
    backward_kernel<T, N><<<shape.grid, shape.block, 0, stream>>>(static_cast<const T*>(gate_up),
        static_cast<const T*>(dy), static_cast<T*>(dgate_up), rows, width);
  });
  launch_check("swiglu backward");
}

}  // namespace pith::cuda
