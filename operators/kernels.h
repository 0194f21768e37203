// The functions that launch the kernels of NAME.cu, for NAME.cpp: raw pointers and sizes, no ATen.
// Matrices are contiguous, their data BF16 where is_bf16, otherwise FP32, if no type is given.
#pragma once
#include <cstdint>
#include <limits>

struct CUstream_st;

namespace pith::cuda {

// Throws pith::Error: "<what>: <CUDA's text>" with this file and line.
[[noreturn]] void fail(const char* what, const char* error, const char* file, unsigned line);

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

// --- grouped_bias ---
// offsets (experts): the ends of the experts' rows. y (rows, columns) += bias (experts, columns) of
// the row's expert.
void add_expert_bias(const void* bias, const int32_t* offsets, void* y, int64_t experts,
    int64_t columns, bool is_bf16, CUstream_st* stream);

// --- grouped_wgrad ---
// gradient (experts, out, in) float32 += dy^T x over each expert's rows; dy (rows, out), x (rows,
// in) bfloat16, offsets (experts) the ends of their rows. False, and nothing is done, where this
// kernel does not run: it needs a Hopper GPU, out and in multiples of 8, data at 16-byte addresses.
bool grouped_weight_gradient(const void* dy, const void* x, const int32_t* offsets, float* gradient,
    int64_t rows, int64_t experts, int64_t out, int64_t in, CUstream_st* stream);

// --- linear_cross_entropy ---
// logits (rows, V): writes logprobs (rows) and, with `gradient`, softmax - onehot(label) over the
// logits, 0 for label -100.
void cross_entropy_rows(void* logits, const int64_t* labels, float* logprobs, int64_t rows,
    int64_t vocabulary, bool gradient, bool is_bf16, CUstream_st* stream);

// --- permute ---
// out (S, H) = rows[row_of_slot], rows of row_bytes bytes.
void gather_rows(void* out, const void* rows, const int32_t* row_of_slot, int64_t slots,
    int64_t row_bytes, CUstream_st* stream);

// out (R, H) = sum over j of weight(r, j) * slots(slot_of(r, j)); weight may be null (all 1).
void gather_sum(void* out, const void* slots, const float* weight, const int32_t* slot_of,
    int64_t rows, int64_t k, int64_t hidden, bool is_bf16, CUstream_st* stream);

// dslots(slot_of(r, j)) = weight(r, j) * dout(r); dweight(r, j) = <dout(r), slots(slot_of(r, j))>.
void unpermute_backward(void* dslots, float* dweight, const void* dout, const void* slots,
    const float* weight, const int32_t* slot_of, int64_t rows, int64_t k, int64_t hidden,
    bool is_bf16, CUstream_st* stream);

// --- rms_norm ---
// Row r of x starts at (r / inner) * outer_stride + (r % inner) * inner_stride, others at r * dim.
struct NormRows {
  int64_t count, dim, inner, outer_stride, inner_stride;
};
// The factor is weight + plus.
void rms_norm_forward(const void* x, const NormRows& rows, const void* weight, float plus,
    double eps, void* y, float* rstd, bool is_bf16, CUstream_st* stream);
// Rows of `partial` that the backward needs.
int64_t rms_norm_blocks(const NormRows& rows);
// dx (count, dim) and dweight (dim) += unless null; partial (rms_norm_blocks, dim) is scratch.
void rms_norm_backward(const void* x, const NormRows& rows, const void* weight, float plus,
    const float* rstd, const void* dy, void* dx, float* partial, float* dweight, bool is_bf16,
    CUstream_st* stream);

// --- rotary ---
// x (rows, heads, dim) with these strides in elements, last dimension contiguous -> y, whose rows
// follow each other; cos and sin (table_rows, dim / 2). Pairs are neighbours or halves.
void rotary(const void* x, const int32_t* positions, const float* cos, const float* sin, void* y,
    int64_t rows, int64_t heads, int64_t dim, int64_t row_stride, int64_t head_stride,
    int64_t y_head_stride, int64_t table_rows, bool neighbours, bool inverse, bool is_bf16,
    CUstream_st* stream);

// --- router ---
// Softmax of logits (rows, E), their top-k (or a copy of `forced` (rows, k)) and its weights.
void route_forward(const float* logits, const int64_t* forced, float* probabilities, int64_t* idx,
    float* weight, int64_t rows, int64_t num_experts, int64_t k, bool normalize,
    CUstream_st* stream);

// dlogits from dprobabilities (may be null) and dweight (may be null).
void route_backward(const float* probabilities, const int64_t* idx, const float* dprobabilities,
    const float* dweight, float* dlogits, int64_t rows, int64_t num_experts, int64_t k,
    bool normalize, CUstream_st* stream);

// --- swiglu ---
// g sigmoid(alpha g) (u + plus) of gates, at most `limit`, and ups between -limit and limit. They
// alternate, or all gates of a row stand before its ups.
struct SwigluForm {
  float alpha = 1, limit = std::numeric_limits<float>::infinity(), plus = 0;
  bool alternating = false;
};
// gate_up (rows, 2 width) -> y (rows, width).
void swiglu_forward(const void* gate_up, void* y, int64_t rows, int64_t width, SwigluForm form,
    bool is_bf16, CUstream_st* stream);
// gate_up (rows, 2 width), dy (rows, width) -> dgate_up (rows, 2 width).
void swiglu_backward(const void* gate_up, const void* dy, void* dgate_up, int64_t rows,
    int64_t width, SwigluForm form, bool is_bf16, CUstream_st* stream);

}  // namespace pith::cuda
