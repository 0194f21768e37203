// Launchers of NAME.cu's kernels, on the current stream. No ATen. Matrices are contiguous.
#pragma once
#include <cstdint>
#include <limits>

struct CUstream_st;

namespace pith::cuda {

// "<what>: <CUDA's text>" with this file and line.
[[noreturn]] void fail(const char* what, const char* error, const char* file, unsigned line);
CUstream_st* current_stream();

// BF16 or FP32, one for all of a call. It is any T* that a kernel of that type takes.
struct Data {
  void* pointer;
  bool bf16;
  template <class T> operator T*() const { return static_cast<T*>(pointer); }
};

// Computed on the host in FP64.
template <class T> struct AdamWScalars {
  T decay; // lr * weight_decay
  T beta1, rest1; // 1 - beta
  T beta2, rest2;
  T epsilon;
  T rate; // lr / (1 - beta1^step)
  T inverse_correction2; // 1 / sqrt(1 - beta2^step)
};
// All (n); is_bf16: value, bf16_moments: exp_avg and exp_avg_sq.
void adamw_update(float* master, void* exp_avg, void* exp_avg_sq, const float* grad, void* value,
  int64_t n, const float* grad_scale, const AdamWScalars<float>& scalars, bool is_bf16,
  bool bf16_moments, CUstream_st* stream);

int64_t sum_of_squares_blocks(); // elements of the scratch `partial`
void sum_of_squares(
  const float* x, int64_t n, double* partial, double* result, CUstream_st* stream);

// g sigmoid(alpha g) (u + plus), g <= limit, |u| <= limit; alternating, or a row's gates first.
struct SwigluForm {
  float alpha = 1, limit = std::numeric_limits<float>::infinity(), plus = 0;
  bool alternating = false;
  bool operator==(const SwigluForm&) const = default;
};

// y (rows, out) = x W by expert, BF16; offsets (experts): ends of their rows. weights (experts,
// out, in), or, across, (experts, in, out); then plus a bias, unless null. With `activation` (rows,
// out / 2) SwiGLU of y too, alternating if across, else of the plain form, and x's rows are
// x[row_of_slot]. Returns false as below.
bool grouped_product(const void* x, const int32_t* row_of_slot, const void* weights, bool across,
  const int32_t* offsets, const void* bias, void* y, void* activation, const SwigluForm& form,
  int64_t rows, int64_t experts, int64_t in, int64_t out);

// gradient (experts, out, in) float32 += dy^T x by expert; dy (rows, out), x (rows, in) bfloat16.
// Returns false, with nothing done, unless on Hopper, out and in multiples of 8, 16-byte addresses.
bool grouped_weight_gradient(const void* dy, const void* x, const int32_t* offsets, float* gradient,
  int64_t rows, int64_t experts, int64_t out, int64_t in);

// logits (rows, V): writes logprobs (rows) and, with `gradient`, softmax - onehot(label) over the
// logits, 0 for label -100.
void cross_entropy_rows(Data logits, const int64_t* labels, float* logprobs, int64_t rows,
  int64_t vocabulary, bool gradient);

// out (S, H): rows (R, H) of row_bytes bytes, each in its slots; slot_of (R, k), -1: none.
void scatter_rows(
  void* out, const void* rows, const int32_t* slot_of, int64_t count, int64_t k, int64_t row_bytes);

// out (R, H) = sum over j of weight(r, j) * slots(slot_of(r, j)); weight null: 1.
void gather_sum(Data out, Data slots, const float* weight, const int32_t* slot_of, int64_t rows,
  int64_t k, int64_t hidden);

// dslots(slot_of(r, j)) = weight(r, j) * dout(r); dweight(r, j) = <dout(r), slots(slot_of(r, j))>.
void unpermute_backward(Data dslots, float* dweight, Data dout, Data slots, const float* weight,
  const int32_t* slot_of, int64_t rows, int64_t k, int64_t hidden);

// Row r of x starts at (r / inner) * outer_stride + (r % inner) * inner_stride, others at r * dim.
struct NormRows {
  int64_t count, dim, inner, outer_stride, inner_stride;
};
// The factor is weight + plus.
void rms_norm_forward(
  Data x, const NormRows& rows, Data weight, float plus, double eps, Data y, float* rstd);
int64_t rms_norm_blocks(const NormRows& rows); // of `partial`
// dx (count, dim), dweight (dim) += unless null; partial (rms_norm_blocks, dim) is scratch.
void rms_norm_backward(Data x, const NormRows& rows, Data weight, float plus, const float* rstd,
  Data dy, Data dx, float* partial, float* dweight);

// x (rows, heads, dim) with these strides in elements, last dimension contiguous -> y, its rows
// adjacent; cos and sin (table_rows, dim / 2).
void rotary(Data x, const int32_t* positions, const float* cos, const float* sin, Data y,
  int64_t rows, int64_t heads, int64_t dim, int64_t row_stride, int64_t head_stride,
  int64_t y_head_stride, int64_t table_rows, bool neighbours, bool inverse);

// Softmax of logits (rows, E), top-k (or `forced` (rows, k)) and weights.
void route_forward(const float* logits, const int64_t* forced, float* probabilities, int64_t* idx,
  float* weight, int64_t rows, int64_t num_experts, int64_t k, bool normalize);

// dprobabilities and dweight may be null.
void route_backward(const float* probabilities, const int64_t* idx, const float* dprobabilities,
  const float* dweight, float* dlogits, int64_t rows, int64_t num_experts, int64_t k,
  bool normalize);

// gate_up (rows, 2 width) -> out (rows, width), or, with dy, its gradient.
void swiglu(Data gate_up, Data dy, Data out, int64_t rows, int64_t width, SwigluForm form);
}
