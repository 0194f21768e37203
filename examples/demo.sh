#!/usr/bin/env bash
# The demo: a tokenizer and a small MoE learn C++ from the headers that the build has installed. Each step is one
# call of the program, printed before it runs, so that it can be repeated by hand.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
program=${PITHTRAIN:-build/pithtrain}
headers=$(echo .deps/lib/python3*/site-packages/torch/include)

run() {
  printf '\n$'
  printf ' %q' "$@"
  printf '\n'
  "$@"
}

[ -e runs/demo/tokenizer/tokenizer.json ] ||
  run "$program" tokenizer train --whole-files --vocab-size 8192 --out runs/demo/tokenizer "$headers"
run "$program" corpus build --tokenizer runs/demo/tokenizer --out runs/demo/corpus/train --extensions .h,.hpp \
  --validation-share 0.02 --validation-out runs/demo/corpus/validation "$headers"
run "$program" pretrain examples/demo.toml
checkpoint=$(ls -d runs/demo/checkpoints/step-* | tail -n 1)
run "$program" inspect "$checkpoint"
run "$program" generate "$checkpoint" --max-tokens 400 --temperature 0.6 --seed 1 \
  --prompt '#include <ATen/'

cat <<END

Where everything lies:
  runs/demo/tokenizer/    the tokenizer of 8,192 tokens
  runs/demo/corpus/       the headers as tokens (.bin, .idx, .json), each corpus with its tokenizer
  runs/demo/config.toml   the resolved configuration
  runs/demo/metrics.jsonl one JSON object a step; runs/demo/tensorboard/ the same for TensorBoard
  $checkpoint   the model: a Hugging Face folder, plus optimizer state and manifest
Run ./pith demo again: it resumes where it stopped. Remove runs/demo to start anew.
END
