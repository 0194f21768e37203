#!/usr/bin/env bash
# Checks and measures on a GPU machine, from executables that may have been built on another one.
#   benchmarks/gpu.sh pack            strip the executables into build/gpu/ (to carry them to a GPU machine)
#   benchmarks/gpu.sh tests           CUDA kernels against the CPU reference
#   benchmarks/gpu.sh operators       operators: bytes and FLOPs over time
#   benchmarks/gpu.sh curve           20 steps of a tiny model on CPU and GPU: the same losses
#   benchmarks/gpu.sh step [KEY=VALUE...]
#                                     the training step of the 8-layer cut of Qwen3-30B-A3B
# Several words run one after another. $OUT (default build/gpu-results) receives metrics and logs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-build/gpu-results}
mkdir -p "$out"

# Executables of this tree; LibTorch from .deps, else from the machine's own Python package.
bin=build
[ -d build/gpu ] && bin=build/gpu
headers=$(echo .deps/lib/python3*/site-packages/torch/include)
if [ "${1:-}" != pack ] && ! ls .deps/lib/python3*/site-packages/nvidia/cudnn >/dev/null 2>&1; then
  torch=$(python3 -c 'import torch; print(torch.__path__[0])')
  site=$(dirname "$torch")
  export LD_LIBRARY_PATH=$torch/lib:$site/nvidia/cu13/lib:$site/nvidia/cudnn/lib:$site/nvidia/nccl/lib:$site/nvidia/cusparselt/lib:$site/nvidia/nvshmem/lib:${LD_LIBRARY_PATH:-}
  headers=$torch/include
fi

pack() {
  mkdir -p build/gpu
  for name in pithtrain test_gpu bench_operators_gpu; do
    [ -e "build/$name" ] && strip -o "build/gpu/$name" "build/$name"
  done
  # The one library of the distribution without an archive; the programs look for it beside themselves.
  cp -L "$(ldd build/pithtrain | awk '/libsimdjson/ { print $3 }')" build/gpu/
  ls -l build/gpu
}

corpus() {
  [ -e runs/demo/corpus/train.idx ] ||
    "$bin/pithtrain" corpus build --out runs/demo/corpus/train --extensions .h,.hpp \
      --validation-share 0.02 --validation-out runs/demo/corpus/validation "$headers"
}

curve() {
  corpus
  local keys=(--set training.steps=20 --set training.global_batch=4 --set training.micro_batch=2
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
    awk '{ d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > worst) worst = d
           e = ($1 - $3) / $1; if (e < 0) e = -e; if (e > worst16) worst16 = e
           printf "step %2d  cpu fp32 %.5f  gpu fp32 %.5f  gpu bf16 %.5f\n", NR, $1, $2, $3 }
         END { printf "largest relative difference to the CPU: fp32 %.2e, bf16 %.2e over %d steps\n", worst, worst16, NR
               exit !(NR == 20 && worst < 1e-3 && worst16 < 2e-2) }'
}

step() {
  corpus
  local keys=()
  for key in "$@"; do keys+=(--set "$key"); done
  rm -rf runs/qwen3_30b_a3b_8layers
  "$bin/pithtrain" pretrain examples/qwen3_30b_a3b_8layers.toml "${keys[@]}" 2>&1 | tee "$out/step.log"
  local status=${PIPESTATUS[0]}
  cp runs/qwen3_30b_a3b_8layers/metrics.jsonl "$out/step.jsonl" 2>/dev/null
  # Median over the steps from the sixth on.
  grep -o '"seconds":[0-9.e-]*' "$out/step.jsonl" | cut -d: -f2 | tail -n +6 | sort -g |
    awk '{ v[NR] = $1 } END { if (NR) printf "median step %.3f s\n", v[int((NR + 1) / 2)] }'
  return "$status"
}

status=0
case "${1:-}" in
  pack) pack ;;
  step) step "${@:2}" || status=1 ;;
  "") sed -n '2,11p' "$0" ;;
  *)
    for word in "$@"; do
      echo "== $word"
      case "$word" in
        tests) "$bin/test_gpu" --gtest_brief=1 2>&1 | tee "$out/tests.log" | tail -n 60; [ "${PIPESTATUS[0]}" = 0 ] || status=1 ;;
        operators) "$bin/bench_operators_gpu" 2>&1 | tee "$out/operators.log" || status=1 ;;
        curve) curve || status=1 ;;
        step) step || status=1 ;;
        *) echo "unknown word $word"; status=2 ;;
      esac
    done
    ;;
esac
exit $status
