// SwiGLU forward and backward: one pass each, bound by memory.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

// Fast forms, relative error about 1e-6: exact ones would take as long as the memory.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// N gates and N ups from column on: of two blocks, or alternating.
template <class T, int N, bool ALTERNATING> struct Pairs {
  Vec<T, N> half[2];
  __device__ T& gate(int j) { return ALTERNATING ? half[2 * j / N].v[2 * j % N] : half[0].v[j]; }
  __device__ T& up(int j) {
    return ALTERNATING ? half[(2 * j + 1) / N].v[(2 * j + 1) % N] : half[1].v[j];
  }
  __device__ static int64_t place(int64_t row, int64_t width, int64_t column, int i) {
    return ALTERNATING ? 2 * (row * width + column) + i * N : (2 * row + i) * width + column;
  }
};

__device__ inline float at_most(float x, float limit) { return x > limit ? limit : x; }  // or NaN

template <class T, int N, bool ALTERNATING> __global__ void forward_kernel(
    const T* gate_up, T* y, int64_t rows, int64_t width, SwigluForm form) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * N;
  if (row >= rows || column >= width) return;
  using Both = Pairs<T, N, ALTERNATING>;
  Both in;
  for (int i = 0; i < 2; ++i) in.half[i] = load<N>(gate_up + Both::place(row, width, column, i));
  Vec<T, N> out;
  for (int j = 0; j < N; ++j) {
    const float g = at_most(to_float(in.gate(j)), form.limit);
    const float u = -at_most(-at_most(to_float(in.up(j)), form.limit), form.limit) + form.plus;
    out.v[j] = from_float<T>(g * sigmoid(form.alpha * g) * u);
  }
  store(y + row * width + column, out);
}

template <class T, int N, bool ALTERNATING> __global__ void backward_kernel(
    const T* gate_up, const T* dy, T* dgate_up, int64_t rows, int64_t width, SwigluForm form) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * N;
  if (row >= rows || column >= width) return;
  using Both = Pairs<T, N, ALTERNATING>;
  Both in, out;
  for (int i = 0; i < 2; ++i) in.half[i] = load<N>(gate_up + Both::place(row, width, column, i));
  const Vec<T, N> dout = load<N>(dy + row * width + column);
  for (int j = 0; j < N; ++j) {
    const float gate = to_float(in.gate(j)), up = to_float(in.up(j)), d = to_float(dout.v[j]);
    const float g = at_most(gate, form.limit);
    const float u = -at_most(-at_most(up, form.limit), form.limit) + form.plus;
    const float s = sigmoid(form.alpha * g);
    const float dgate = d * u * s * (1.0f + form.alpha * g * (1.0f - s));
    out.gate(j) = from_float<T>(gate > form.limit ? 0.0f : dgate);
    out.up(j) = from_float<T>(fabsf(up) > form.limit ? 0.0f : d * g * s);
  }
  for (int i = 0; i < 2; ++i) store(dgate_up + Both::place(row, width, column, i), out.half[i]);
}

}  // namespace

void swiglu_forward(const void* gate_up, void* y, int64_t rows, int64_t width, SwigluForm form,
    bool is_bf16, CUstream_st* stream) {
  if (rows * width == 0) return;
  with_vectors(is_bf16, {gate_up, y}, {width}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, width / N);
    const auto kernel = form.alternating ? forward_kernel<T, N, true> : forward_kernel<T, N, false>;
    kernel<<<shape.grid, shape.block, 0, stream>>>(
        static_cast<const T*>(gate_up), static_cast<T*>(y), rows, width, form);
  });
  launch_check("swiglu forward");
}

void swiglu_backward(const void* gate_up, const void* dy, void* dgate_up, int64_t rows,
    int64_t width, SwigluForm form, bool is_bf16, CUstream_st* stream) {
  if (rows * width == 0) return;
  with_vectors(is_bf16, {gate_up, dy, dgate_up}, {width}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, width / N);
    const auto kernel =
        form.alternating ? backward_kernel<T, N, true> : backward_kernel<T, N, false>;
    kernel<<<shape.grid, shape.block, 0, stream>>>(static_cast<const T*>(gate_up),
        static_cast<const T*>(dy), static_cast<T*>(dgate_up), rows, width, form);
  });
  launch_check("swiglu backward");
}

}  // namespace pith::cuda
