# What gpu.sh and node.sh share, sourced in the repository's root: executables, libraries, corpus, processes on GPUs.

# Executables of this tree, or, where nothing was built, those that `gpu.sh pack` stripped on another machine.
bin=build
[ -e build/pithtrain ] || bin=build/gpu
headers=$(echo .deps/lib/python3*/site-packages/torch/include)

# LibTorch from .deps, where it has all that this machine needs; else from the machine's own Python package.
find_libraries() {
  local torch site
  ls .deps/lib/python3*/site-packages/nvidia/cudnn >/dev/null 2>&1 && return
  [ -d "$headers" ] && [ ! -e /proc/driver/nvidia/version ] && return
  torch=$(python3 -c 'import torch; print(torch.__path__[0])')
  site=$(dirname "$torch")
  export LD_LIBRARY_PATH=$torch/lib:$site/nvidia/cu13/lib:$site/nvidia/cudnn/lib:$site/nvidia/nccl/lib:$site/nvidia/cusparselt/lib:$site/nvidia/nvshmem/lib:${LD_LIBRARY_PATH:-}
  headers=$torch/include
}

corpus() {
  [ -e runs/demo/corpus/train.idx ] ||
    "${PITHTRAIN:-$bin/pithtrain}" corpus build --out runs/demo/corpus/train --extensions .h,.hpp \
      --validation-share 0.02 --validation-out runs/demo/corpus/validation "$headers"
}

# ranks N COMMAND...: N processes, one a GPU, started as torchrun does; fails when one does.
ranks() {
  local n=$1 rank pids=() failed=0
  shift
  for ((rank = 0; rank < n; rank++)); do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT=${PORT:-29511} \
      "$@" >"$out/rank$rank.log" 2>&1 &
    pids+=($!)
  done
  for rank in "${pids[@]}"; do wait "$rank" || failed=$?; done
  cat "$out/rank0.log"
  [ $failed = 0 ] || for ((rank = 1; rank < n; rank++)); do tail -n 15 "$out/rank$rank.log"; done
  return $failed
}
