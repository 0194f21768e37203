// SwiGLU forward and backward: one pass each, bound by memory.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {

// Fast forms, relative error about 1e-6: exact ones would take as long as the memory.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// N gates and N ups from column on: of two blocks, or (CLAMPED) alternating.
template <class T, int N, bool CLAMPED>
struct Pairs {
  Vec<T, N> half[2];
  __device__ T& gate(int j) { return CLAMPED ? half[2 * j / N].v[2 * j % N] : half[0].v[j]; }
  __device__ T& up(int j) {
    return CLAMPED ? half[(2 * j + 1) / N].v[(2 * j + 1) % N] : half[1].v[j];
  }
  __device__ static int64_t place(int64_t row, int64_t width, int64_t column, int i) {
    return CLAMPED ? 2 * (row * width + column) + i * N : (2 * row + i) * width + column;
  }
};

template <class T, int N, bool CLAMPED>
__global__ void forward_kernel(
    const T* gate_up, T* y, int64_t rows, int64_t width, SwigluClamp clamp) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * N;
  if (row >= rows || column >= width) return;
  using Both = Pairs<T, N, CLAMPED>;
  Both in;
  for (int i = 0; i < 2; ++i)
    in.half[i] = load<N>(gate_up + Both::place(row, width, column, i));
  Vec<T, N> out;
  for (int j = 0; j < N; ++j) {
    float g = to_float(in.gate(j)), u = to_float(in.up(j)), s;
    if constexpr (CLAMPED) {  // comparisons let a NaN through
      g = g > clamp.limit ? clamp.limit : g;
      u = (u > clamp.limit ? clamp.limit : u < -clamp.limit ? -clamp.limit : u) + 1.0f;
      s = sigmoid(clamp.alpha * g);
    } else {
      s = sigmoid(g);
    }
    out.v[j] = from_float<T>(g * s * u);
  }
  store(y + row * width + column, out);
}

template <class T, int N, bool CLAMPED>
__global__ void backward_kernel(const T* gate_up, const T* dy, T* dgate_up, int64_t rows,
    int64_t width, SwigluClamp clamp) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * N;
  if (row >= rows || column >= width) return;
  using Both = Pairs<T, N, CLAMPED>;
  Both in, out;
  for (int i = 0; i < 2; ++i)
    in.half[i] = load<N>(gate_up + Both::place(row, width, column, i));
  const Vec<T, N> dout = load<N>(dy + row * width + column);
  for (int j = 0; j < N; ++j) {
    const float gate = to_float(in.gate(j)), up = to_float(in.up(j)), d = to_float(dout.v[j]);
    float dgate, dup;
    if constexpr (CLAMPED) {
      const float limit = clamp.limit, g = gate > limit ? limit : gate;
      const float u = up > limit ? limit : up < -limit ? -limit : up;
      const float s = sigmoid(clamp.alpha * g);
      dgate = gate > limit ? 0.0f : d * (u + 1.0f) * s * (1.0f + clamp.alpha * g * (1.0f - s));
      dup = fabsf(up) > limit ? 0.0f : d * g * s;
    } else {
      const float s = sigmoid(gate);
      dgate = d * up * s * (1.0f + gate * (1.0f - s));
      dup = d * gate * s;
    }
    out.gate(j) = from_float<T>(dgate);
    out.up(j) = from_float<T>(dup);
  }
  for (int i = 0; i < 2; ++i) store(dgate_up + Both::place(row, width, column, i), out.half[i]);
}

// Calls f<CLAMPED>().
template <class F>
void with_form(const SwigluClamp& clamp, F&& f) {
  clamp.limit > 0 ? f.template operator()<true>() : f.template operator()<false>();
}

}  // namespace

void swiglu_forward(const void* gate_up, void* y, int64_t rows, int64_t width, SwigluClamp clamp,
    bool is_bf16, CUstream_st* stream) {
  if (rows * width == 0) return;
  with_vectors(is_bf16, {gate_up, y}, {width}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, width / N);
    with_form(clamp, [&]<bool CLAMPED>() {
      forward_kernel<T, N, CLAMPED><<<shape.grid, shape.block, 0, stream>>>(
          static_cast<const T*>(gate_up), static_cast<T*>(y), rows, width, clamp);
    });
  });
  launch_check("swiglu forward");
}

void swiglu_backward(const void* gate_up, const void* dy, void* dgate_up, int64_t rows,
    int64_t width, SwigluClamp clamp, bool is_bf16, CUstream_st* stream) {
  if (rows * width == 0) return;
  with_vectors(is_bf16, {gate_up, dy, dgate_up}, {width}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, width / N);
    with_form(clamp, [&]<bool CLAMPED>() {
      backward_kernel<T, N, CLAMPED><<<shape.grid, shape.block, 0, stream>>>(
          static_cast<const T*>(gate_up), static_cast<const T*>(dy), static_cast<T*>(dgate_up),
          rows, width, clamp);
    });
  });
  launch_check("swiglu backward");
}

}  // namespace pith::cuda
