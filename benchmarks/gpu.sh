#!/usr/bin/env bash
# Checks and measures on a GPU machine, from executables that may have been built on another one.
#   benchmarks/gpu.sh pack            strip the executables into build/gpu/ (to carry them to a GPU machine)
#   benchmarks/gpu.sh tests           CUDA kernels against the CPU reference
#   benchmarks/gpu.sh bench           operators and steps of three models (at most 8 minutes) into $OUT/bench.json, compared
#                                     with benchmarks/record.json; fails if something is slower
#   benchmarks/gpu.sh record          the same, and the result becomes benchmarks/record.json
#   benchmarks/gpu.sh breakdown       one step of Qwen3 by operator: FLOPs, bytes, time at the ceilings, time measured
#   benchmarks/gpu.sh sanitizer       compute-sanitizer over one small test of each kernel
#   benchmarks/gpu.sh operators       operators (ONLY="MoE layer": whose name has this): bytes and FLOPs over time
#   benchmarks/gpu.sh curve           (steps=100: so many) 20 steps of a tiny model on CPU and GPU: the same losses
#   benchmarks/gpu.sh transformers    50 steps of a small model of each family, here and in transformers
#   benchmarks/gpu.sh step [KEY=VALUE...]
#                                     the training step of the 8-layer cut of Qwen3-30B-A3B, or of
#                                     examples/$MODEL.toml (deepseek_v2_lite_8layers, gpt_oss_20b_6layers)
#   benchmarks/gpu.sh collectives     all visible GPUs: every NCCL collective, the layout suite over NCCL
#   benchmarks/gpu.sh profiles        two GPUs: where a step's time goes on one, EP2, PP2, CP2 at 32k; traces
#                                     for benchmarks/trace_picture.sh
#   benchmarks/gpu.sh layouts         (ONLY="one32k cp2": these) two GPUs: that step ($MODEL) on one of them, then EP2, PP2, FSDP2, and CP2 at 32k
# Several words run one after another. $OUT (default build/gpu-results) receives metrics and logs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-build/gpu-results}
mkdir -p "$out"

source benchmarks/common.sh
[ "${1:-}" = pack ] || find_libraries

pack() {
  mkdir -p build/gpu
  for name in pithtrain test_gpu test_parallel bench_operators_gpu; do
    [ -e "build/$name" ] && strip -o "build/gpu/$name" "build/$name"
  done
  # The one library of the distribution without an archive; the programs look for it beside themselves.
  cp -L "$(ldd build/pithtrain | awk '/libsimdjson/ { print $3 }')" build/gpu/
  ls -l build/gpu
}

curve() {
  corpus
  local steps=${steps:-20}
  local keys=(--set training.steps=$steps --set training.global_batch=4 --set training.micro_batch=2
    --set checkpoint.save=false --set validation.interval=0 --set training.lr=1e-3)
  rm -rf runs/curve-cpu runs/curve-cuda runs/curve-cuda-bf16
  "$bin/pithtrain" pretrain examples/demo.toml "${keys[@]}" --set run.device=cpu \
    --set run.folder=runs/curve-cpu >"$out/curve-cpu.log" 2>&1 || return 1
  "$bin/pithtrain" pretrain examples/demo.toml "${keys[@]}" --set run.device=cuda \
    --set run.folder=runs/curve-cuda >"$out/curve-cuda.log" 2>&1 || { tail -n 5 "$out/curve-cuda.log"; return 1; }
  "$bin/pithtrain" pretrain examples/demo.toml "${keys[@]}" --set run.device=cuda --set model.dtype=bfloat16 \
    --set run.folder=runs/curve-cuda-bf16 >"$out/curve-cuda-bf16.log" 2>&1 || { tail -n 5 "$out/curve-cuda-bf16.log"; return 1; }
  paste <(grep -o '"loss":[0-9.]*' runs/curve-cpu/metrics.jsonl) \
    <(grep -o '"loss":[0-9.]*' runs/curve-cuda/metrics.jsonl) \
    <(grep -o '"loss":[0-9.]*' runs/curve-cuda-bf16/metrics.jsonl) | tr -d '"a-z:' |
    awk -v steps="$steps" '{ d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > worst) worst = d
           e = ($1 - $3) / $1; if (e < 0) e = -e; if (e > worst16) worst16 = e
           printf "step %2d  cpu fp32 %.5f  gpu fp32 %.5f  gpu bf16 %.5f\n", NR, $1, $2, $3 }
         END { printf "largest relative difference to the CPU: fp32 %.2e, bf16 %.2e over %d steps\n", worst, worst16, NR
               exit !(NR == steps && worst < 1e-3 && worst16 < 2e-2) }'
}

step() {
  corpus
  local keys=() model=${MODEL:-qwen3_30b_a3b_8layers}
  for key in "$@"; do keys+=(--set "$key"); done
  rm -rf "runs/$model"
  "$bin/pithtrain" pretrain "examples/$model.toml" "${keys[@]}" 2>&1 | tee "$out/step.log"
  local status=${PIPESTATUS[0]}
  cp "runs/$model/metrics.jsonl" "$out/step.jsonl" 2>/dev/null
  # Median over the steps from the sixth on.
  grep -o '"seconds":[0-9.e-]*' "$out/step.jsonl" | cut -d: -f2 | tail -n +6 | sort -g |
    awk '{ v[NR] = $1 } END { if (NR) printf "median step %.3f s\n", v[int((NR + 1) / 2)] }'
  return "$status"
}

# bench_step MODEL SECONDS: nine steps as an object of bench.json, on one line; the median is that of step, of steps 6 to 9.
bench_step() {
  local model=$1 begin
  rm -rf "runs/$model"
  begin=$(date +%s.%N)
  timeout -s KILL "$2" "$bin/pithtrain" pretrain "examples/$model.toml" --set training.steps=9 >"$out/bench-$model.log" 2>&1 ||
    { tail -n 5 "$out/bench-$model.log" >&2; return 1; }
  cp "runs/$model/metrics.jsonl" "$out/bench-$model.jsonl"
  awk -v name="$model" -v begin="$begin" '
    function field(key) { return match($0, "\"" key "\":[-0-9.e+]+") ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) : 0 }
    /"seconds":/ {
      if (field("step") == 1) first = field("time") - begin
      if (field("memory_peak_gib") > peak) peak = field("memory_peak_gib")
      if (field("step") < 6) next
      tokens = field("tokens")
      for (i = ++n; i > 1 && v[i - 1] > field("seconds"); --i) v[i] = v[i - 1]
      v[i] = field("seconds")
    }
    END {
      if (n != 4) exit 1
      printf "{\"name\": \"%s\", \"seconds\": %.4f, \"tokens_per_second\": %.0f, \"memory_gib\": %.2f, \"first_step_seconds\": %.2f}\n",
        name, v[2], tokens / v[2], peak, first
    }' "$out/bench-$model.jsonl" || { echo "bench: $model has no steps 6 to 9" >&2; return 1; }
}

# Eight minutes for all, whatever hangs: each model may take what is left.
bench() {
  local failed=0 model rows=() end=$((SECONDS + 470))
  corpus
  : >"$out/operators.jsonl"
  timeout -s KILL 180 "$bin/bench_operators_gpu" --json "$out/operators.jsonl" >"$out/operators.log" 2>&1 ||
    { tail -n 3 "$out/operators.log"; failed=1; }
  for model in qwen3_30b_a3b_8layers deepseek_v2_lite_8layers gpt_oss_20b_6layers; do
    if [ $((end - SECONDS)) -lt 10 ]; then echo "bench: no time left for $model"; failed=1; continue; fi
    model=$(bench_step "$model" $((end - SECONDS))) && rows+=("$model") || failed=1
  done
  {
    printf '{\n"date": "%s",\n"device": "%s",\n"driver": "%s",\n"commit": "%s",\n' "$(date -u +%F)" \
      "$(nvidia-smi -i 0 --query-gpu=name --format=csv,noheader)" \
      "$(nvidia-smi -i 0 --query-gpu=driver_version --format=csv,noheader)" "$("$bin/pithtrain" --version | grep -oE '[0-9a-f]{12}(-dirty)?' | head -n 1)"
    printf '"steps": [\n'
    printf '%s\n' ${rows[@]+"${rows[@]}"} | sed '$!s/$/,/'
    printf '],\n"operators": [\n'
    sed '$!s/$/,/' "$out/operators.jsonl"
    printf ']\n}\n'
  } >"$out/bench.json"
  benchmarks/compare_bench.sh benchmarks/record.json "$out/bench.json" | tee "$out/bench.txt"
  [ "${PIPESTATUS[0]}" = 0 ] && slower=0 || slower=1
  return $failed
}

# Only a whole measurement becomes the record; that it is slower than the last one does not matter then.
record() {
  bench || { echo "record: not everything was measured; benchmarks/record.json stays"; return 1; }
  cp "$out/bench.json" benchmarks/record.json
  echo "benchmarks/record.json is of this machine and commit now"
}

breakdown() {
  local folder=runs/breakdown
  corpus
  rm -rf "$folder"
  "$bin/pithtrain" pretrain examples/qwen3_30b_a3b_8layers.toml --set training.steps=7 --set profile.steps=[7,7] \
    --set "run.folder=$folder" "$@" >"$out/breakdown.log" 2>&1 || { tail -n 12 "$out/breakdown.log"; return 1; }
  cp "$folder/profile-rank0.txt" "$out/breakdown-profile.txt"
  benchmarks/breakdown.sh "$folder" | tee "$out/breakdown.txt"
  return "${PIPESTATUS[0]}"
}

# Each tool over one test of every kernel with small sizes. Without LibTorch's cache of allocations, whose blocks are larger
# than tensors and written before, memcheck and initcheck see every tensor's own borders and first use.
sanitizer() {
  local tool program failed=0 tests="AdamWGpu.ShardsEqualTheWhole:SumOfSquaresGpu.AgreesWithCpu:GroupedLinearGpu.P*"
  tests+=":LinearCrossEntropyGpu.*:PermuteGpu.MatchesTheReference:RmsNormGpu.StridedHeads:RmsNormGpu.ZeroCentred"
  tests+=":RotaryGpu.StridedHeads:RotaryGpu.NeighboursBehindPlainElements:RouterGpu.RouteMatchesTheReference"
  tests+=":RouterGpu.TopKEqualsTheReference:SwiGluGpu.AgreesWithCpu:RandomGpu.AgreesWithCpu"
  program=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}"/bin/compute-sanitizer 2>/dev/null)
  if [ -z "$program" ]; then
    echo "sanitizer: compute-sanitizer (of the CUDA toolkit) is neither in PATH nor in \$CUDA_HOME/bin: nothing was checked"
    return 0
  fi
  for tool in memcheck racecheck initcheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -s KILL "${SANITIZER_LIMIT:-190}" "$program" --tool $tool --error-exitcode 9 \
      "$bin/test_gpu" --gtest_brief=1 --gtest_filter="$tests" >"$out/sanitizer-$tool.log" 2>&1 ||
      { echo "$tool: failed with $? ($out/sanitizer-$tool.log)"; failed=1; }
    grep -E 'SUMMARY|PASSED|FAILED' "$out/sanitizer-$tool.log" | sed "s/^/$tool: /"
  done
  return $failed
}

collectives() {
  local n
  n=$(nvidia-smi -L | wc -l)
  PITH_TEST_DEVICE=cuda PITH_COMM_TIMEOUT_S=60 ranks "$n" timeout -s KILL 240 "$bin/test_parallel" --gtest_brief=1 |
    tail -n 40
  return "${PIPESTATUS[0]}"
}

# layout NAME RANKS KEY=VALUE...: $steps steps (14); prints the median of the steps from the sixth on.
layout() {
  local name=$1 n=$2 keys=() key folder=runs/layout-$1
  shift 2
  [[ " ${ONLY:-$name} " == *" $name "* ]] || return 0
  for key in "$@"; do keys+=(--set "$key"); done
  rm -rf "$folder"
  echo "-- $name: $*"
  if [ "$n" = 1 ]; then
    CUDA_VISIBLE_DEVICES=0 "$bin/pithtrain" pretrain "examples/${MODEL:-qwen3_30b_a3b_8layers}.toml" --set training.steps=${steps:-14} \
      --set "run.folder=$folder" "${keys[@]}" >"$out/$name.log" 2>&1 || { tail -n 12 "$out/$name.log"; return 1; }
  else
    ranks "$n" timeout -s KILL 200 "$bin/pithtrain" pretrain "examples/${MODEL:-qwen3_30b_a3b_8layers}.toml" --set training.steps=${steps:-14} \
      --set "run.folder=$folder" "${keys[@]}" >"$out/$name.log" 2>&1 || { tail -n 30 "$out/$name.log"; return 1; }
  fi
  cp "$folder/metrics.jsonl" "$out/$name.jsonl"
  grep -o 'loss [ 0-9.]*' "$out/$name.log" | head -n 3 | tr '\n' ' '
  tail -n 1 "$out/$name.log"
  grep -o '"seconds":[0-9.e-]*' "$out/$name.jsonl" | cut -d: -f2 | tail -n +6 | sort -g |
    awk -v name="$name" '{ v[NR] = $1 } END { m = v[int((NR + 1) / 2)]; printf "%s: median step %.4f s, %.1fk tok/s\n", name, m, 131.072 / m }'
}

# The head weighs three of the eight layers: with a share of it on the second GPU both have the same work.
pp2=(parallel.pp=2 parallel.chunks=2,1,4,1 parallel.head_share=0.15)
long=(data.sequence_length=32768 training.global_batch=4)

# Two GPUs have memory for micro-batches twice as large: half as many additions to the gradients.
layouts() {
  corpus
  local failed=0
  layout one 1 || failed=1
  layout ep2 2 parallel.ep=2 training.micro_batch=8 || failed=1
  layout fsdp2 2 training.micro_batch=8 || failed=1
  layout pp2 2 "${pp2[@]}" || failed=1
  layout one32k 1 "${long[@]}" training.micro_batch=1 || failed=1
  layout cp2 2 parallel.cp=2 "${long[@]}" training.micro_batch=2 || failed=1
  return $failed
}

profiles() {
  corpus
  local steps=7 failed=0 name rank
  local trace=(profile.steps=[7,7])
  layout one 1 "${trace[@]}" || failed=1
  layout ep2 2 parallel.ep=2 training.micro_batch=8 "${trace[@]}" || failed=1
  layout pp2 2 "${pp2[@]}" "${trace[@]}" || failed=1
  layout cp2 2 parallel.cp=2 "${long[@]}" training.micro_batch=2 "${trace[@]}" || failed=1
  for name in one ep2 pp2 cp2; do
    [ -d "runs/layout-$name" ] || continue
    for rank in 0 1; do
      cp "runs/layout-$name/profile-rank$rank.txt" "$out/profile-$name-$rank.txt" 2>/dev/null || continue
      gzip -9 <"runs/layout-$name/trace-rank$rank.json" >"$out/trace-$name-$rank.json.gz"
    done
    echo "-- $name" && head -n 24 "$out/profile-$name-0.txt" || failed=1
  done
  return $failed
}

status=0
case "${1:-}" in
  pack) pack ;;
  step) step "${@:2}" || status=1 ;;
  breakdown) breakdown "${@:2}" || status=1 ;;
  "") sed -n '2,/^# Several/p' "$0" ;;
  *)
    for word in "$@"; do
      echo "== $word"
      case "$word" in
        tests) "$bin/test_gpu" --gtest_brief=1 2>&1 | tee "$out/tests.log" | tail -n 60; [ "${PIPESTATUS[0]}" = 0 ] || status=1 ;;
        operators) "$bin/bench_operators_gpu" ${ONLY:+--only "$ONLY"} 2>&1 | tee "$out/operators.log" || status=1 ;;
        curve) curve || status=1 ;;
        step) step || status=1 ;;
        transformers) corpus && python3 benchmarks/transformers_curve.py --program "$bin/pithtrain" 2>&1 | tee "$out/transformers.log" |
          grep -v "it/s" || status=1 ;;
        bench) bench && [ "$slower" = 0 ] || status=1 ;;
        collectives | layouts | profiles | record | breakdown | sanitizer) "$word" || status=1 ;;
        *) echo "unknown word $word"; status=2 ;;
      esac
    done
    ;;
esac
exit $status
