// Bound by memory.
#include "operators/kernel.cuh"

namespace pith::cuda {
namespace {
// From column on: of two blocks, or alternating.
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

// out: the activation, or, BACKWARD, gate_up's gradient.
template <class T, int N, bool ALTERNATING, bool BACKWARD> __global__ void swiglu_kernel(
  const T* gate_up, const T* dy, T* out, int64_t rows, int64_t width, SwigluForm form) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  const int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * N;
  if (row >= rows || column >= width) return;
  using Both = Pairs<T, N, ALTERNATING>;
  Both in, gradient;
  for (int i = 0; i < 2; ++i) in.half[i] = load<N>(gate_up + Both::place(row, width, column, i));
  Vec<T, N> y;
  if constexpr (BACKWARD) y = load<N>(dy + row * width + column);
  for (int j = 0; j < N; ++j) {
    const float gate = to_float(in.gate(j)), up = to_float(in.up(j));
    const float g = at_most(gate, form.limit), u = clamped(up, form.limit) + form.plus;
    const float s = inverse(1.0f + exp_minus(form.alpha * g));
    if constexpr (BACKWARD) {
      const float d = to_float(y.v[j]);
      const float dgate = d * u * s * (1.0f + form.alpha * g * (1.0f - s));
      gradient.gate(j) = from_float<T>(gate > form.limit ? 0.0f : dgate);
      gradient.up(j) = from_float<T>(fabsf(up) > form.limit ? 0.0f : d * g * s);
    } else {
      y.v[j] = from_float<T>(s * (g * u));
    }
  }
  if constexpr (BACKWARD)
    for (int i = 0; i < 2; ++i) store(out + Both::place(row, width, column, i), gradient.half[i]);
  else store(out + row * width + column, y);
}
}

void swiglu(Data gate_up, Data dy, Data out, int64_t rows, int64_t width, SwigluForm form) {
  if (rows * width == 0) return;
  with_vectors(out.bf16, {gate_up, dy, out}, {width}, [&]<class T, int N>() {
    const RowGrid shape = row_grid(rows, width / N);
    const auto launch = [&]<bool ALTERNATING>() {
      const auto kernel = dy.pointer ? swiglu_kernel<T, N, ALTERNATING, true>
                                     : swiglu_kernel<T, N, ALTERNATING, false>;
      kernel<<<shape.grid, shape.block, 0, current_stream()>>>(gate_up, dy, out, rows, width, form);
    };
    form.alternating ? launch.template operator()<true>() : launch.template operator()<false>();
  });
}
}
