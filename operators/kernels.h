// The functions that launch the kernels of NAME.cu, for NAME.cpp, on the current stream: raw
// pointers and sizes, no ATen. Matrices are contiguous.
#pragma once
#include <cstdint>
#include <limits>

struct CUstream_st;

namespace pith::cuda {

// Throws pith::Error: "<what>: <CUDA's text>" with this file and line.
[[noreturn]] void fail(const char* what, const char* error, const char* file, unsigned line);
CUstream_st* current_stream();

// A matrix of the compute dtype, BF16 or FP32; all of a call have the same. It is any T* that a
// kernel of that type takes.
struct Data {
  void* pointer;
  bool bf16;
  template <class T> operator T*() const { return static_cast<T*>(pointer); }
};

// --- adamw ---
// A step's scalars, computed on the host in FP64.
template <class T> struct AdamWScalars {
  T decay;         // lr * weight_decay
  T beta1, rest1;  // rest: 1 - beta
  T beta2, rest2;
  T epsilon;
  T rate;                 // lr / (1 - beta1^step)
  T inverse_correction2;  // 1 / sqrt(1 - beta2^step)
};
// All (n); is_bf16: the value, bf16_moments: exp_avg and exp_avg_sq.
void adamw_update(float* master, void* exp_avg, void* exp_avg_sq, const float* grad, void* value,
    int64_t n, const float* grad_scale, const AdamWScalars<float>& scalars, bool is_bf16,
    bool bf16_moments, CUstream_st* stream);

// result: one number; partial (sum_of_squares_blocks()) is scratch.
int64_t sum_of_squares_blocks();
void sum_of_squares(
    const float* x, int64_t n, double* partial, double* result, CUstream_st* stream);

// --- grouped_linear ---
// offsets (experts): the ends of the experts' rows. y (rows, columns) += bias (experts, columns) of
// the row's expert.
void add_expert_bias(Data bias, const int32_t* offsets, Data y, int64_t experts, int64_t columns);

// gradient (experts, out, in) float32 += dy^T x over each expert's rows; dy (rows, out), x (rows,
// in) bfloat16, offsets (experts) the ends of their rows. False, and nothing is done, where this
// kernel does not run: it needs a Hopper GPU, out and in multiples of 8, data at 16-byte addresses.
bool grouped_weight_gradient(const void* dy, const void* x, const int32_t* offsets, float* gradient,
    int64_t rows, int64_t experts, int64_t out, int64_t in);

// --- linear_cross_entropy ---
// logits (rows, V): writes logprobs (rows) and, with `gradient`, softmax - onehot(label) over the
// logits, 0 for label -100.
void cross_entropy_rows(Data logits, const int64_t* labels, float* logprobs, int64_t rows,
    int64_t vocabulary, bool gradient);

// --- permute ---
// out (S, H) = rows[row_of_slot], rows of row_bytes bytes.
void gather_rows(
    void* out, const void* rows, const int32_t* row_of_slot, int64_t slots, int64_t row_bytes);

// out (R, H) = sum over j of weight(r, j) * slots(slot_of(r, j)); weight may be null (all 1).
void gather_sum(Data out, Data slots, const float* weight, const int32_t* slot_of, int64_t rows,
    int64_t k, int64_t hidden);

// dslots(slot_of(r, j)) = weight(r, j) * dout(r); dweight(r, j) = <dout(r), slots(slot_of(r, j))>.
void unpermute_backward(Data dslots, float* dweight, Data dout, Data slots, const float* weight,
    const int32_t* slot_of, int64_t rows, int64_t k, int64_t hidden);

// --- rms_norm ---
// Row r of x starts at (r / inner) * outer_stride + (r % inner) * inner_stride, others at r * dim.
struct NormRows {
  int64_t count, dim, inner, outer_stride, inner_stride;
};
// The factor is weight + plus.
void rms_norm_forward(
    Data x, const NormRows& rows, Data weight, float plus, double eps, Data y, float* rstd);
// Rows of `partial` that the backward needs.
int64_t rms_norm_blocks(const NormRows& rows);
// dx (count, dim) and dweight (dim) += unless null; partial (rms_norm_blocks, dim) is scratch.
void rms_norm_backward(Data x, const NormRows& rows, Data weight, float plus, const float* rstd,
    Data dy, Data dx, float* partial, float* dweight);

// --- rotary ---
// x (rows, heads, dim) with these strides in elements, last dimension contiguous -> y, whose rows
// follow each other; cos and sin (table_rows, dim / 2). Pairs are neighbours or halves.
void rotary(Data x, const int32_t* positions, const float* cos, const float* sin, Data y,
    int64_t rows, int64_t heads, int64_t dim, int64_t row_stride, int64_t head_stride,
    int64_t y_head_stride, int64_t table_rows, bool neighbours, bool inverse);

// --- router ---
// Softmax of logits (rows, E), their top-k (or a copy of `forced` (rows, k)) and its weights.
void route_forward(const float* logits, const int64_t* forced, float* probabilities, int64_t* idx,
    float* weight, int64_t rows, int64_t num_experts, int64_t k, bool normalize);

// dprobabilities and dweight may be null.
void route_backward(const float* probabilities, const int64_t* idx, const float* dprobabilities,
    const float* dweight, float* dlogits, int64_t rows, int64_t num_experts, int64_t k,
    bool normalize);

// --- swiglu ---
// g sigmoid(alpha g) (u + plus) of gates, at most `limit`, and ups between -limit and limit. They
// alternate, or all gates of a row stand before its ups.
struct SwigluForm {
  float alpha = 1, limit = std::numeric_limits<float>::infinity(), plus = 0;
  bool alternating = false;
};
// gate_up (rows, 2 width) -> out (rows, width), or, with dy (rows, width), its gradient.
void swiglu(Data gate_up, Data dy, Data out, int64_t rows, int64_t width, SwigluForm form);

}
