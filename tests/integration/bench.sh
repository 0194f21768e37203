# Measuring without a GPU: the comparison of two results, a made-up profile by operator, gpu.sh with stand-ins for programs.
set -u
benchmarks=$PITH_SOURCE_DIR/benchmarks failures=0
fail() { echo "FAIL: $*: $(cat log)"; failures=$((failures + 1)); }
expect() {  # expect STATUS PATTERN COMMAND...
  local wanted=$1 pattern=$2 status=0
  shift 2
  "$@" >log 2>&1 || status=$?
  [ $status -eq "$wanted" ] || fail "exit $status of $*"
  grep -qE -- "$pattern" log || fail "no '$pattern' from $*"
}
never() { ! grep -qE -- "$1" log || fail "'$1' is not expected"; }

# --- compare_bench.sh: result SECONDS GIB MS [TINY_MS [MORE ROWS]] ---
result() {
  cat <<JSON
{ "date": "2026-11-30", "device": "NVIDIA H200", "note": "a \"quoted\" note",
"steps": [{"name": "qwen3", "seconds": $1, "memory_gib": $2, "first_step_seconds": ${6:-3}}],
"operators": [
{"name": "swiglu", "shape": "8 x 8", "ms": $3, "ceiling_ms": 0.5, "bound": "bytes"},
{"name": "route", "shape": "8 x 8", "ms": ${4:-0.01}, "ceiling_ms": 0.001}${5:-} ] }
JSON
}
compare() { "$benchmarks/compare_bench.sh" old.json "${1:-new.json}"; }
result 2.0 100 1.0 >old.json
expect 0 'nothing is slower' compare old.json
grep -qE '^swiglu, 8 x 8, ms +1 +1 +1\.000$' log || fail "no row of an operator"
never '^(slower|faster|more memory|in the record)'
result 2.07 100 1.0 >new.json && expect 1 '^  qwen3, s a step: 3\.5 %' compare
result 2.05 100 1.04 >new.json && expect 0 'nothing is slower' compare
result 2.0 100 1.06 >new.json && expect 1 '^  swiglu, 8 x 8, ms: 6\.0 %' compare
result 1.8 100 0.9 >new.json && expect 0 '^faster' compare
grep -q '^  qwen3, s a step: 10.0 %' log || fail "the faster step is not named"
result 2.0 101 1.0 >new.json && expect 0 '^more memory' compare
result 2.0 100.2 1.0 >new.json && expect 0 'nothing is slower' compare
never '^more memory'
result 2.0 100 1.0 0.05 '' 9 >new.json && expect 0 '^route, 8 x 8, ms .*\(5\.000\)' compare  # not judged
grep -q 'end of step 1 .*(3\.000)' log || fail "the start is judged"
result 2.0 100 1.0 0.01 ', {"name": "new", "shape": "1", "ms": 1}' >new.json
expect 0 '^new, 1, ms .* new$' compare
expect 1 'not measured' "$benchmarks/compare_bench.sh" new.json old.json
result 2.0 100 null >new.json && expect 1 'in the record but not measured' compare
result 2.0 100 1.0 | grep -v '"operators"' | sed 's/}],$/}]}/; /swiglu\|route/d' >new.json
expect 1 '^  swiglu, 8 x 8, ms' compare
result 2.0 100 1.0 | sed 's/H200/H100/' >new.json && expect 0 'different devices' compare
result 2.0 100 1.0 | head -c 200 >new.json && expect 2 'new.json is damaged' compare
for text in '' '{"steps": [}' '{"steps": [] "operators": []}' 'seconds: 1' '{"steps": []} {}'; do
  printf '%s' "$text" >new.json
  expect 2 'new.json is damaged' compare
done
echo '{"loss": 1}' >new.json && expect 2 'no result of gpu.sh bench' compare
expect 2 'cannot read nowhere.json' compare nowhere.json
expect 0 'qwen3_30b_a3b_8layers, s a step' "$benchmarks/compare_bench.sh" "$benchmarks/record.json" "$benchmarks/record.json"

# --- breakdown.sh: a step of 100 ms; names as kernels and the summary have them, cut at 140 characters ---
mkdir run
cat >run/config.toml <<TOML
[model]
config = "$PITH_SOURCE_DIR/examples/qwen3_30b_a3b/config.json"
num_layers = 8
[data]
sequence_length = 4096
[training]
steps = 20
global_batch = 32
micro_batch = 4
[profile]
steps = [7, 7]
TOML
expect 1 'profile.steps' "$benchmarks/breakdown.sh" run
cat >run/profile-rank0.txt <<'TEXT'
100.00 ms: computing 95.00, communication 0.00 (0.0 % behind computing, 0.00 ms alone), idle 5.00

      ms      %   calls  name
   20.00  20.00     256  void pith::cuda::(anonymous namespace)::product_kernel<false, true>(CUtensorMap_st, CUtensorMap_st, CUtensorMap_st, CUtensorMap_st
   12.00  12.00     128  void pith::cuda::(anonymous namespace)::weight_gradient_kernel(CUtensorMap, CUtensorMap, float*)
   11.00  11.00       3  nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT
    9.00   9.00      64  nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT
    4.00   4.00      64  cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0
    7.00   7.00      64  cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_4x1x1_kernel0_0
    0.50   0.50      64  void cudnn::fusion::compute_dot_do_o_specialized<true, cutlass::bfloat16_t, float, 64, 128>
    3.00   3.00      32  void pith::cuda::(anonymous namespace)::cross_entropy_kernel<__nv_bfloat16, 8>(__nv_bfloat16*, long const*)
    2.00   2.00     264  void pith::cuda::(anonymous namespace)::forward_kernel<__nv_bfloat16, pith::cuda::(anonymous namespace)::Spread>
    1.50   1.50     264  void pith::cuda::(anonymous namespace)::backward_kernel<__nv_bfloat16, pith::cuda::(anonymous namespace)::Spread>
    0.25   0.25     264  pith::cuda::(anonymous namespace)::add_columns_kernel(float const*, float*, long, long)
    1.00   1.00     256  void pith::cuda::(anonymous namespace)::rotary_kernel<__nv_bfloat16, 8, false>(__nv_bfloat16 const*)
    1.25   1.25      64  void pith::cuda::(anonymous namespace)::scatter_kernel<uint4>(uint4*, uint4 const*, int const*)
    1.50   1.50     128  void pith::cuda::(anonymous namespace)::gather_sum_kernel<__nv_bfloat16, 8>(__nv_bfloat16*)
    1.00   1.00      64  void pith::cuda::(anonymous namespace)::unpermute_backward_kernel<__nv_bfloat16, 8>(__nv_bfloat16*)
    2.75   2.75     128  void pith::cuda::(anonymous namespace)::swiglu_kernel<__nv_bfloat16, 8, false, true>(__nv_bfloat16 const*)
    0.20   0.20      64  void pith::cuda::(anonymous namespace)::route_forward_kernel<4>(float const*, long const*)
    0.30   0.30      64  void pith::cuda::(anonymous namespace)::route_backward_kernel<4>(float const*, long const*)
    0.50   0.50      64  void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy<short, long>
    4.50   4.50       9  void pith::cuda::(anonymous namespace)::adamw_kernel<__nv_bfloat16, float, 4>(float*, float*, float*)
    0.75   0.75       9  void pith::cuda::(anonymous namespace)::squares_kernel<4>(float const*, long, double*)
    0.60   0.60       9  void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >
    0.40   0.40       9  Memset (Device)
    2.25   2.25     320  void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >
    0.75   0.75       8  void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)
TEXT
broken_down() {  # broken_down OPERATOR MS [TFLOP]
  grep -qE "^$1 +${3:-[-0-9.]+} .* $2 +$2 " log || fail "not $2 ms (and %) of $1"
}
expect 0 'ceil. ms' "$benchmarks/breakdown.sh" run
broken_down 'grouped products' 20.00 158.33
broken_down 'grouped weight gradient' 12.00 79.16
broken_down 'head products' 11.00 244.71  # 3.7 ms a call
broken_down 'projections, router product' 9.00
broken_down 'attention forward' 4.00 35.18
broken_down 'attention backward' 7.50 87.96
broken_down 'softmax of the head' 3.00 -
broken_down norms 3.75
broken_down rotary 1.00
broken_down 'permute, unpermute' 3.75
broken_down swiglu 2.75
broken_down 'router, expert plan' 1.00
broken_down AdamW 4.50
broken_down 'norm of the gradient' 0.75
broken_down zeroing 1.00
broken_down additions 2.25
broken_down rest 0.75
grep -q '^ *0.75 ms  void at::native::vectorized_gather_kernel' log || fail "the rest is not named"
[ "$(awk '$1 == "step" { print $2, $3 }' log)" = "100.00 100.00" ] || fail "no step of 100 ms"
# The trace knows each call: one kernel for the head and for a projection is told apart.
{
  printf '{\n  "traceEvents": [\n'
  for us in 3700.000 450.500; do
    printf '  {\n    "ph": "X", "cat": "kernel", "name": "nvjet_sm90_tst_TNT", "pid": 0, "tid": 7,\n    "ts": 12.345, "dur": %s,\n    "args": { "stream": 7 }\n  },\n' $us
  done
  printf '  {\n    "ph": "X", "cat": "gpu_user_annotation", "name": "stage attend", "pid": 0, "tid": 7,\n    "ts": 12.345, "dur": 9000.000\n  }\n]}\n'
} >run/trace-rank0.json
expect 0 '^head products .* 3\.70 ' "$benchmarks/breakdown.sh" run
grep -qE '^projections, router product .* 0\.45 ' log || fail "no projection of 0.45 ms"
rm run/trace-rank0.json
sed -i 's/steps = \[7, 7\]/steps = [7, 8]/' run/config.toml && expect 0 '^step +50\.00' "$benchmarks/breakdown.sh" run
sed 's/qwen3_30b_a3b/gpt_oss_20b/' -i.qwen3 run/config.toml && expect 1 'is no qwen3_moe' "$benchmarks/breakdown.sh" run

# --- gpu.sh: the programs are scripts that write what the real ones write ---
mkdir -p tree/build tree/bin tree/.deps/lib/python3/site-packages/nvidia/cudnn tree/runs/demo/corpus
cp -r "$benchmarks" tree/ && touch tree/runs/demo/corpus/train.idx
cat >tree/build/pithtrain <<'SH'
#!/usr/bin/env bash
[ "$1" = --version ] && { echo "pithtrain 1234567890ab-dirty, GNU 12"; exit; }
model=$(basename "$2" .toml)
for word; do case $word in run.folder=*) mkdir -p "${word#*=}" && cp "$PROFILE"/* "${word#*=}" && exit ;; esac; done
[ "$model" = "${BROKEN:-}" ] && { echo "error: out of memory"; exit 1; }
mkdir -p "runs/$model"
for step in 1 2 3 4 5 6 7 8 9; do
  echo "{\"loss\":4.5,\"memory_peak_gib\":9$step.25,\"seconds\":1.$((10 - step)),\"step\":$step,\"time\":$(date +%s.%3N),\"tokens\":131072,\"trained_tokens\":7}"
done >"runs/$model/metrics.jsonl"
echo '{"event":"stop","step":9}' >>"runs/$model/metrics.jsonl"
SH
cat >tree/build/bench_operators_gpu <<'SH'
#!/usr/bin/env bash
printf '{"name": "swiglu", "shape": "%s", "ms": 0.1, "ceiling_ms": 0.07}\n' 1 2 >"$2"
SH
printf '#!/usr/bin/env bash\ncase $* in *driver*) echo 590.1 ;; *) echo "NVIDIA H200" ;; esac\n' >tree/bin/nvidia-smi
chmod +x tree/build/* tree/bin/*
gpu() { PATH=$PWD/tree/bin:$PATH OUT=$PWD/out tree/benchmarks/gpu.sh "$@"; }
expect 1 'in the record but not measured' gpu bench
expect 0 '"device".NVIDIA H200' sh -c "awk -f '$benchmarks/json.awk' out/bench.json | tr '\t' '.' | sed 's/^\([a-z]*\)[.]/\"\1\"./'"
grep -q '"commit"\.1234567890ab-dirty' log || fail "no commit"
grep -qE '"name": "gpt_oss_20b_6layers", "seconds": 1.2000, "tokens_per_second": 109227, "memory_gib": 99.25, "first_step_seconds": [0-9]' out/bench.json ||
  fail "no step: $(cat out/bench.json)"
BROKEN=gpt_oss_20b_6layers expect 1 'benchmarks/record.json stays' gpu record
grep -q 'out of memory' log || fail "the cause is not said"
expect 0 'record.json is of this machine' gpu record
cmp -s out/bench.json tree/benchmarks/record.json || fail "the record is another"
expect 0 'nothing is slower' gpu bench
sed -i 's/1\.\$/2.$/' tree/build/pithtrain && expect 1 's a step: 8' gpu bench
mv run/config.toml.qwen3 run/config.toml
PROFILE=$PWD/run expect 0 '^grouped products .* 20\.00 ' gpu breakdown training.lr=0
grep -q '^grouped products' out/breakdown.txt && [ -s out/breakdown-profile.txt ] || fail "nothing in \$OUT"
PROFILE=/nowhere expect 1 '' gpu breakdown
CUDA_HOME=/nowhere expect 0 'nothing was checked' gpu sanitizer
printf '#!/usr/bin/env bash\necho "========= ERROR SUMMARY: 0 errors"\n[ "$2" != "${BROKEN:-}" ] || exit 9\n' >tree/bin/compute-sanitizer
chmod +x tree/bin/compute-sanitizer
expect 0 'initcheck: =+ ERROR SUMMARY: 0' gpu sanitizer
BROKEN=racecheck expect 1 '^racecheck: failed with 9' gpu sanitizer
[ $failures -eq 0 ] && echo "PASS"
exit $((failures > 0))
