// Times of single operators on a GPU, with the sizes of Qwen3-30B-A3B and 8192 tokens (65536 where
// bytes bind, or the launch would be timed, and the L2 cache): a table of
// name, shape, milliseconds (median), the time that bytes and FLOPs take at the measured ceilings,
// and the rate of the one that takes longer. `--only TEXT`: rows whose name has it. `--json FILE`
// also writes a JSON object a row:
//   name, shape, ms, bytes, flop (at least to be moved and computed), ceiling_ms, bound ("bytes",
//   "flop", or "none" where neither is counted), gb_per_s, tflop_per_s
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/autograd.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string_view>
#include "core/device.h"
#include "core/parameter.h"
#include "core/random.h"
#include "operators/adamw.h"
#include "operators/attention.h"
#include "operators/embedding.h"
#include "operators/grouped_linear.h"
#include "operators/kernels.h"
#include "operators/linear.h"
#include "operators/linear_cross_entropy.h"
#include "operators/permute.h"
#include "operators/rms_norm.h"
#include "operators/rotary.h"
#include "operators/router.h"
#include "operators/swiglu.h"
#include "tests/allocate.h"

namespace pith {
namespace {
constexpr int64_t kTokens = 8192, kMany = 65536, kHidden = 2048, kHeads = 32, kKvHeads = 4,
                  kHeadDim = 128;
constexpr int64_t kExperts = 128, kTopK = 8, kExpertHidden = 768, kVocabulary = 151936;
constexpr int64_t kSlots = kTokens * kTopK;

at::Device device(at::kCUDA, 0);

// Median seconds of one call, from samples of about 10 ms.
double seconds(const std::function<void()>& f) {
  using Clock = std::chrono::steady_clock;
  auto sample = [&](int64_t calls) {
    synchronize(device);
    const auto start = Clock::now();
    for (int64_t i = 0; i < calls; ++i) f();
    synchronize(device);
    return std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(calls);
  };
  sample(2); // plans and workspaces
  const auto calls = static_cast<int64_t>(std::clamp(0.01 / sample(2), 1.0, 200.0));
  std::vector<double> samples;
  for (int i = 0; i < 11; ++i) samples.push_back(sample(calls));
  std::nth_element(samples.begin(), samples.begin() + 5, samples.end());
  return samples[5];
}

// Measured on one H200: a copy, and dense products of BF16.
constexpr double kBytesPerSecond = 4.27e12, kFlopPerSecond = 790e12;

struct Work {
  double bytes = 0, flop = 0;
};

std::FILE* json = nullptr; // of --json
std::string_view only; // of --only

// BF16 elements; what a weight's gradient takes: FP32 read and written.
double bf16(auto... elements) { return (2.0 * ... * static_cast<double>(elements)); }
double gradient(auto... elements) { return (8.0 * ... * static_cast<double>(elements)); }

void report(const char* name, const char* shape, Work work, const std::function<void()>& f) {
  if (std::string_view(name).find(only) == std::string_view::npos) return;
  const double time = seconds(f), rate = work.bytes / time / 1e9, flops = work.flop / time / 1e12;
  const double moving = work.bytes / kBytesPerSecond, computing = work.flop / kFlopPerSecond;
  const double ceiling = std::max(moving, computing);
  std::printf("%-34s %-26s %9.4f ms", name, shape, time * 1e3);
  if (ceiling > 0) std::printf("  %9.4f at the ceilings", ceiling * 1e3);
  if (moving > computing) std::printf("  %7.0f GB/s", rate);
  else if (computing > 0) std::printf("  %7.1f TFLOP/s", flops);
  std::printf("\n");
  std::fflush(stdout);
  if (json == nullptr) return;
  const char* bound = ceiling == 0 ? "none" : moving > computing ? "bytes" : "flop";
  std::fprintf(json,
    R"({"name": "%s", "shape": "%s", "ms": %.5g, "bytes": %.5g, "flop": %.5g, )"
    R"("ceiling_ms": %.5g, "bound": "%s", "gb_per_s": %.5g, "tflop_per_s": %.5g})"
    "\n",
    name, shape, time * 1e3, work.bytes, work.flop, ceiling * 1e3, bound, rate, flops);
  std::fflush(json);
}

// The forward without recording, then the backward of one recorded call, repeated.
void report_both(const char* name, const char* shape, Work forward, Work backward,
  const std::vector<Tensor>& inputs, const std::function<Tensor()>& f) {
  {
    const at::NoGradGuard no_grad;
    report(name, shape, forward, f);
  }
  const Tensor y = f(), dy = at::full(y.sizes(), 0.5, y.options());
  report((std::string(name) + " backward").c_str(), shape, backward, [&] {
    torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/true, false, /*allow_unused=*/true);
  });
}

Tensor random(const char* name, std::vector<int64_t> shape, at::ScalarType dtype = at::kBFloat16,
  double std = 1.0) {
  Tensor out = at::empty(shape, at::TensorOptions(dtype).device(device));
  fill_normal(out, 1, name, std);
  return out.set_requires_grad(true);
}

void fill_weight(Parameter& weight, double std) {
  allocate(weight, at::kBFloat16, device);
  Tensor value = weight.value.detach();
  fill_normal(value, 1, weight.name, std);
}

void bench_router() {
  const Tensor logits = random("logits", {kMany, kExperts}, at::kFloat);
  const double table = 4.0 * kMany * kExperts;
  report("topk_lowest_id", "65536 x 128, top 8", {table}, [&] { topk_lowest_id(logits, kTopK); });
  report_both("route", "65536 x 128, top 8", {2 * table}, {2 * table}, {logits},
    [&] { return route(logits, kTopK, true).topk_weight; });
  const Routing routing = route(logits, kTopK, true);
  const Tensor probabilities = routing.probabilities.detach().set_requires_grad(true);
  const Tensor row_id =
    at::arange(kMany, at::TensorOptions(device)).div(4096, "floor").to(at::kInt);
  report_both("sequence_balance_loss", "65536 x 128, 16 rows", {table}, {table}, {probabilities},
    [&] { return start_balance_loss(probabilities, routing.topk_idx, row_id, 16)().loss; });
}

void bench_permute() {
  const Tensor logits = random("logits", {kMany, kExperts}, at::kFloat);
  const Routing routing = route(logits, kTopK, true);
  report("make_expert_plan (waits for it)", "65536 x 8 of 128", {},
    [&] { make_expert_plan(routing.topk_idx, kExperts); });
  report("make_expert_plan", "65536 x 8 of 128", {16.0 * kMany * kTopK},
    [&] { make_expert_plan(routing.topk_idx, kExperts, kMany * kTopK); });
  const ExpertPlan plan = make_expert_plan(routing.topk_idx, kExperts);
  const Tensor rows = random("rows", {kMany, kHidden}),
               slots = random("slots", {kMany * kTopK, kHidden});
  const Tensor weight = routing.topk_weight.detach().set_requires_grad(true);
  const double few = 2.0 * kMany * kHidden, many = 2.0 * kMany * kTopK * kHidden;
  report_both("permute", "65536 -> 524288 x 2048", {few + many}, {few + many}, {rows},
    [&] { return permute(rows, plan); });
  report_both("unpermute", "524288 -> 65536 x 2048", {few + many}, {few + 2 * many},
    {slots, weight}, [&] { return unpermute(slots, weight, plan); });
}

void bench_grouped_linear() {
  const ExpertPlan plan =
    make_expert_plan(balanced_routes(kTokens, kTopK, kExperts, device), kExperts);
  auto run = [&](const char* name, const char* shape, int64_t in, int64_t out) {
    Parameter weight(name, {kExperts, out, in}, ParameterGroup::expert, Init::normal);
    fill_weight(weight, 0.02);
    const Tensor x = random("x", {kSlots, in});
    const double flop = 2.0 * kSlots * static_cast<double>(in * out);
    const double rows = bf16(kSlots, in + out), elements = static_cast<double>(kExperts * in * out);
    report_both(name, shape, {rows + bf16(elements), flop},
      {2 * rows + bf16(elements) + gradient(elements), 2 * flop}, {x, weight.value},
      [&] { return grouped_linear(x, weight, plan); });
  };
  run("grouped_linear gate, up", "65536 x 2048 -> 1536", kHidden, 2 * kExpertHidden);
  run("grouped_linear down", "65536 x 768 -> 2048", kExpertHidden, kHidden);
}

// A whole MoE layer of 16,384 tokens: router, experts, combine; loads as even as they can be.
// clamped: GPT-OSS' activation and biases.
void bench_moe_layer(const char* name, int64_t hidden, int64_t width, int64_t experts, int64_t k,
  bool normalize, bool clamped) {
  constexpr int64_t kRows = 16384;
  Parameter router("router", {experts, hidden}, ParameterGroup::router, Init::normal);
  Parameter gate_up = clamped
    ? Parameter("gate_up", {experts, hidden, 2 * width}, ParameterGroup::expert, Init::normal)
    : Parameter("gate_up", {experts, 2 * width, hidden}, ParameterGroup::expert, Init::normal);
  Parameter down = clamped
    ? Parameter("down", {experts, width, hidden}, ParameterGroup::expert, Init::normal)
    : Parameter("down", {experts, hidden, width}, ParameterGroup::expert, Init::normal);
  Parameter gate_up_bias("gate_up_bias", {experts, 2 * width}, ParameterGroup::expert, Init::zeros);
  Parameter down_bias("down_bias", {experts, hidden}, ParameterGroup::expert, Init::zeros);
  for (Parameter* weight: {&router, &gate_up, &down, &gate_up_bias, &down_bias})
    fill_weight(*weight, 0.02);
  const Tensor rows = random("rows", {kRows, hidden});
  const Tensor forced = balanced_routes(kRows, k, experts, device);
  const auto layer = [&] {
    const Routing routing = route(linear_fp32(rows, router), k, normalize, forced);
    const ExpertPlan plan = make_expert_plan(routing.topk_idx, experts);
    if (clamped) {
      const Tensor up = permuted_swiglu(rows, gate_up, plan, {1.702f, 7, 1, true}, &gate_up_bias);
      return unpermute(grouped_affine(up, down, down_bias, plan), routing.topk_weight, plan);
    }
    const Tensor slots = permuted_swiglu(rows, gate_up, plan);
    return unpermute(grouped_linear(slots, down, plan), routing.topk_weight, plan);
  };
  const double flop = 6.0 * kRows * static_cast<double>(k * hidden * width);
  // What one kernel for the whole layer would move: rows in and out, and weights.
  const double weights = 3.0 * static_cast<double>(experts * hidden * width);
  const double io = bf16(kRows, 2 * hidden);
  const auto title = std::string("MoE layer ") + name;
  {
    const at::NoGradGuard no_grad;
    report(title.c_str(), "16384 tokens", {io + bf16(weights), flop}, [&] { layer(); });
  }
  const Tensor dy = at::full({kRows, hidden}, 0.5, rows.options());
  report((title + " both").c_str(), "16384 tokens",
    {3 * io + 2 * bf16(weights) + gradient(weights), 3 * flop},
    [&] { torch::autograd::grad({layer()}, {rows}, {dy}, false, false, /*allow_unused=*/true); });
}

AttentionSpan span_of(const std::vector<int32_t>& cu) {
  AttentionSpan span;
  span.cu_q_host = at::empty({static_cast<int64_t>(cu.size())}, at::TensorOptions(at::kInt));
  std::copy(cu.begin(), cu.end(), span.cu_q_host.mutable_data_ptr<int32_t>());
  span.cu_k_host = span.cu_q_host;
  span.cu_q = span.cu_k = span.cu_q_host.to(device);
  for (size_t d = 1; d < cu.size(); ++d)
    span.max_q = std::max<int64_t>(span.max_q, cu[d] - cu[d - 1]);
  span.max_k = span.max_q;
  return span;
}

void bench_attention() {
  const Tensor q = random("q", {kTokens, kHeads, kHeadDim}),
               k = random("k", {kTokens, kKvHeads, kHeadDim});
  const Tensor v = random("v", {kTokens, kKvHeads, kHeadDim});
  auto run = [&](const char* shape, const std::vector<int32_t>& cu) {
    const AttentionSpan span = span_of(cu);
    double pairs = 0; // (query, key) under the causal mask
    for (size_t d = 1; d < cu.size(); ++d) {
      const double length = cu[d] - cu[d - 1];
      pairs += length * length / 2;
    }
    const double flop = 4.0 * kHeads * kHeadDim * pairs;
    std::printf("  path: %s\n", attention_path(q, v, span));
    // q, k, v, the result and their gradients; the sums of the softmax are FP32.
    const double rows = bf16(kTokens, kHeadDim, 2 * kHeads + 2 * kKvHeads);
    const double sums = 4.0 * kTokens * kHeads;
    report_both("attention 32/4 d128", shape, {rows + sums, flop}, {2 * rows + sums, 2.5 * flop},
      {q, k, v}, [&] { return attention(q, k, v, span, 0.088); });
  };
  run("2 x 4096", {0, 4096, 8192});
  run("3000 + 4000 + 1192", {0, 3000, 7000, 8192});
  at::globalContext().setDeterministicAlgorithms(true, false);
  run("2 x 4096, deterministic", {0, 4096, 8192});
  at::globalContext().setDeterministicAlgorithms(false, false);
}

void bench_cross_entropy() {
  Parameter weight("head", {kVocabulary, kHidden}, ParameterGroup::embedding, Init::normal);
  fill_weight(weight, 0.02);
  const Tensor hidden = random("hidden", {kTokens, kHidden});
  const Tensor labels = at::arange(kTokens, at::TensorOptions(at::kLong).device(device));
  const double flop = 2.0 * kTokens * kHidden * static_cast<double>(kVocabulary);
  // The budget gives chunks of 4096 rows here. Each reads the weight; with a gradient twice, and
  // adds to the weight's. Logits are written, read, turned into their gradient, read twice.
  const double rows = bf16(kTokens, kHidden), logits = bf16(kTokens, kVocabulary);
  const double elements = static_cast<double>(kVocabulary * kHidden);
  {
    const at::NoGradGuard no_grad;
    report("linear_cross_entropy, no gradient", "8192 x 2048 -> 151936",
      {rows + 2 * logits + 2 * bf16(elements), flop},
      [&] { linear_cross_entropy(hidden, weight, labels, 1e-4); });
  }
  for (int64_t chunk: {0, 1024, 2048, 4096, 8192}) {
    const std::string shape = chunk == 0 ? "chunk by budget" : "chunk " + std::to_string(chunk);
    const auto chunks = static_cast<double>(kTokens / (chunk == 0 ? 4096 : chunk));
    const double weights = chunks * (2 * bf16(elements) + gradient(elements));
    report("linear_cross_entropy, gradient", shape.c_str(),
      {3 * rows + 5 * logits + weights, 3 * flop},
      [&] { linear_cross_entropy(hidden, weight, labels, 1e-4, chunk); });
  }
#if PITH_CUDA
  const int64_t count = 4096;
  Tensor block = random("logits", {count, kVocabulary});
  Tensor logprobs = at::empty({count}, block.options().dtype(at::kFloat));
  const double bytes = bf16(block.numel());
  for (bool backward: {false, true}) {
    // At least: reads the logits once and writes the gradient once. (Repeats read what the call
    // before has left there, which costs the same.)
    report("cross_entropy_rows", backward ? "4096 x 151936, gradient" : "4096 x 151936",
      {backward ? 2 * bytes : bytes}, [&] {
      cuda::cross_entropy_rows({block.mutable_data_ptr(), true}, labels.const_data_ptr<int64_t>(),
        logprobs.mutable_data_ptr<float>(), count, kVocabulary, backward);
    });
  }
#endif
}

void bench_embedding() {
  Parameter weight("embedding", {kVocabulary, kHidden}, ParameterGroup::embedding, Init::normal);
  fill_weight(weight, 0.02);
  const Tensor tokens =
    at::randint(kVocabulary, {kMany}, at::TensorOptions(at::kLong).device(device));
  const double rows = 2.0 * kMany * kHidden; // bytes of BF16 rows
  report_both("embedding", "65536 of 151936 x 2048", {2 * rows}, {5 * rows}, {weight.value},
    [&] { return embedding(tokens, weight); });
}

void bench_linear() {
  auto run = [&](const char* name, const char* shape, int64_t in, int64_t out, bool fp32) {
    Parameter weight(name, {out, in}, ParameterGroup::matrix, Init::normal);
    fill_weight(weight, 0.02);
    const Tensor x = random("x", {kTokens, in});
    // An FP32 gradient of the result is taken in three BF16 parts: three times the products.
    const double flop = 2.0 * kTokens * static_cast<double>(in * out), parts = fp32 ? 3 : 1;
    const double result = (fp32 ? 2 : 1) * bf16(kTokens, out),
                 elements = static_cast<double>(in * out);
    report_both(name, shape, {bf16(kTokens, in) + result + bf16(elements), flop},
      {2 * bf16(kTokens, in) + result + bf16(elements) + gradient(elements), 2 * parts * flop},
      {x, weight.value}, [&] { return fp32 ? linear_fp32(x, weight) : linear(x, weight); });
  };
  const int64_t q = kHeads * kHeadDim, qkv = q + 2 * kKvHeads * kHeadDim;
  run("linear", "8192 x 2048 -> 5120", kHidden, qkv, false);
  run("linear", "8192 x 4096 -> 2048", q, kHidden, false);
  run("linear_fp32", "8192 x 2048 -> 128", kHidden, kExperts, true);
}

void bench_norm_and_rotary() {
  Parameter wide("norm", {kHidden}, ParameterGroup::norm, Init::ones);
  Parameter narrow("head norm", {kHeadDim}, ParameterGroup::norm, Init::ones);
  fill_weight(wide, 1.0);
  fill_weight(narrow, 1.0);
  const Tensor x = random("x", {kMany, kHidden});
  const double bytes = 2.0 * kMany * kHidden;
  report_both("rms_norm", "65536 x 2048", {2 * bytes}, {3 * bytes}, {x, wide.value},
    [&] { return rms_norm(x, wide, 1e-6); });
  // Queries and keys lie in a fused projection of q, k and v; the time of their backward holds no
  // slice's backward.
  const int64_t qkv_heads = kHeads + 2 * kKvHeads;
  const Tensor qkv = random("qkv", {kMany, qkv_heads, kHeadDim}).detach();
  const RotaryTable table = make_rotary_table(4096, kHeadDim, 1e6, device);
  const Tensor positions =
    at::arange(kMany, at::TensorOptions(device)).remainder(4096).to(at::kInt);
  for (const int64_t heads: {kHeads, kKvHeads}) {
    const std::string shape = "65536 x " + std::to_string(heads) + " of 40 x 128";
    const Tensor q = qkv.narrow(1, heads == kHeads ? 0 : kHeads, heads).requires_grad_();
    const double size = bf16(kMany, heads, kHeadDim);
    report_both("rms_norm of heads", shape.c_str(), {2 * size}, {3 * size}, {q, narrow.value},
      [&] { return rms_norm(q, narrow, 1e-6); });
    report_both("rotary", shape.c_str(), {2 * size}, {2 * size}, {q},
      [&] { return rotary(q, positions, table); });
  }
  const Tensor a = x.detach(), b = a.clone();
  report("addition of rows", "65536 x 2048", {3 * bytes}, [&] { at::add(a, b); });
}

void bench_swiglu() {
  const Tensor gate_up = random("gate_up", {kSlots, 2 * kExpertHidden});
  const double bytes = 2.0 * kSlots * kExpertHidden;
  report_both(
    "swiglu", "65536 x 768", {3 * bytes}, {5 * bytes}, {gate_up}, [&] { return swiglu(gate_up); });
}

void bench_optimizer() {
  const int64_t n = int64_t{1} << 28;
  const auto make = [&](at::ScalarType dtype) { return random("flat", {n}, dtype, 1e-3).detach(); };
  Tensor master = make(at::kFloat), exp_avg = make(at::kFloat), value = make(at::kBFloat16);
  Tensor exp_avg_sq = exp_avg.square();
  const Tensor grad = make(at::kFloat), scale = at::full({}, 0.5, grad.options());
  const auto elements = static_cast<double>(n);
  report("adamw_update", "268 M", {30 * elements}, [&] {
    adamw_update(master, exp_avg, exp_avg_sq, grad, value, scale, {1e-4, 0.9, 0.95, 1e-8, 0.1, 10});
  });
  report("sum_of_squares", "268 M", {4 * elements}, [&] { sum_of_squares(grad); });
  report("zeroing of gradients", "268 M", {4 * elements}, [&] { grad.zero_(); });
  report("fill_normal", "268 M BF16", {2 * elements}, [&] { fill_normal(value, 1, "x", 1.0); });
}

} // namespace
} // namespace pith

int main(int argc, char** argv) {
  using namespace pith;
  const char* file = nullptr;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view option = argv[i];
    if (i + 1 == argc || (option != "--json" && option != "--only")) {
      std::fprintf(stderr, "usage: bench_operators_gpu [--json FILE] [--only TEXT]\n");
      return 2;
    }
    if (option == "--json") file = argv[i + 1];
    else only = argv[i + 1];
  }
  try {
    device = select_device("cuda");
    std::printf("%s\n", describe_device(device).c_str());
  } catch (const Error& error) {
    std::printf("bench_operators_gpu: nothing measured: %s\n", error.what());
    return file == nullptr ? 0 : 1; // who wants a file must not take its absence for a result
  }
  if (file != nullptr && (json = std::fopen(file, "w")) == nullptr) {
    std::perror(file);
    return 1;
  }
  bench_embedding();
  bench_linear();
  bench_norm_and_rotary();
  bench_swiglu();
  bench_optimizer();
  bench_router();
  bench_permute();
  bench_grouped_linear();
  bench_moe_layer("Qwen3", 2048, 768, 128, 8, true, false);
  bench_moe_layer("DeepSeek-V2-Lite", 2048, 1408, 64, 6, false, false);
  bench_moe_layer("GPT-OSS", 2880, 2880, 32, 4, true, true);
  bench_attention();
  bench_cross_entropy();
  return json != nullptr && std::fclose(json) != 0 ? 1 : 0;
}
