#!/usr/bin/env bash
# Muon, parameter groups, BF16 moments, the average of the weights, decays of WSD and skipped steps through the program,
# on one process and two.
set -eu
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
tiny_text 60
"$PITHTRAIN" corpus build --out corpus text >/dev/null
tiny_config dense='[1]'
tiny_toml corpus <<'END'
[training]
steps = 8
global_batch = 8
micro_batch = 1
lr = 1e-2
warmup_steps = 2
optimizer = "muon"
moments = "bfloat16"
ema_decay = 0.5
[[training.groups]]
pattern = "norm"
weight_decay = 0.01
[[training.groups]]
pattern = "k_proj|layers\\.1\\."
lr_scale = 0.5
[log]
tensorboard = false
END
train() { "$PITHTRAIN" pretrain run.toml --set run.folder="$1" "${@:2}" >"$1.log" 2>&1 || { cat "$1.log"; fail "$1"; }; }
numbers() { grep '"loss"' "$1/metrics.jsonl" | grep -oE '"(step|loss|grad_norm|lr)":[^,}]*'; }
losses() { numbers "$1" | grep loss | cut -d: -f2; }
refused() { # refused PATTERN COMMAND...
  local pattern=$1
  shift
  if "$@" >refused.log 2>&1; then fail "accepted: $*"; fi
  grep -qE "$pattern" refused.log || { cat refused.log; fail "no '$pattern' from: $*"; }
}
pretrain() { "$PITHTRAIN" pretrain run.toml --set run.folder="$1" "${@:2}"; }
same_losses() { # same_losses A B TOLERANCE
  paste <(losses "$1") <(losses "$2") | awk -v t="$3" '$1 ~ /^[0-9]/ { d = $1 / $2 - 1; if (d > t || d < -t) exit 1 }' ||
    fail "$1 and $2 differ"
}

# Straight, resumed, and on two processes; the average is a model folder that generates and trains on.
train straight
grep -q 'optimizer: adamw, rate x 0.5, decay 0: 4 tensors.*; muon, rate x 1, decay 0.1: 15 tensors, 11.8k .*; moments in bfloat16; average of the weights, 0.5' \
  straight.log || { cat straight.log; fail "the optimizer is not described"; }
losses straight | awk 'NR == 1 { first = $1 } END { exit !($1 < 0.9 * first) }' || fail "the loss does not fall"
train halves --set checkpoint.interval=4
rm -r halves/checkpoints/step-00000008
train halves
diff <(numbers straight) <(numbers halves) || fail "resuming changed the numbers"
diff -r -x run.toml -x manifest.json {straight,halves}/checkpoints/step-00000008 || fail "resuming changed the checkpoint"
for layout in "parallel.ep=2" "parallel.weights=reshard" "parallel.pp=2"; do
  "$PITHTRAIN" launch 2 pretrain run.toml --set run.folder=two --set $layout >two.log 2>&1 || { cat two.log; fail "$layout"; }
  same_losses straight two 1e-4
  rm -r two
done
model=straight/checkpoints/step-00000008
refused 'keeps an average of the weights, which this run would lose' pretrain straight --set training.ema_decay=0
"${PYTHON:-python3}" "$PITH_SOURCE_DIR/tests/golden/check_checkpoint.py" $model/ema --files-only || fail "files of the average"
generate() { "$PITHTRAIN" generate "$1" --device cpu --max-tokens 20 --temperature 0 --prompt 12 --prompt 314 2>/dev/null; }
generate $model/ema >average.txt || fail "the average does not generate"
[ -s average.txt ] || fail "the average generates nothing"
! cmp -s $model/ema/model-00001-of-00001.safetensors $model/model-00001-of-00001.safetensors || fail "the average is the weights"
train continued --set model.init=$model/ema --set training.steps=1 --set training.warmup_steps=0 --set training.lr=1e-8
awk -v a="$(losses straight | tail -n 1)" -v b="$(losses continued)" 'BEGIN { exit !(b < a * 1.3 && b > a * 0.7) }' ||
  fail "model.init did not take the average"
"$PITHTRAIN" inspect $model >inspect.log || { cat inspect.log; fail "inspect"; }

# What does not fit is named.
refused 'there is no exp_avg of model.layers.0' pretrain straight --set training.optimizer=adamw
refused 'is bfloat16, here it is float32' pretrain straight --set training.moments=float32
refused 'no tensor of the model matches "q_porj"; the first one is called model.embed_tokens.weight' \
  pretrain other --set 'training.groups=[{pattern = "q_porj"}]'
refused 'no tensor of the model matches "q_porj"' pretrain other --dry-run --set 'training.groups=[{pattern = "q_porj"}]'
pretrain dry --dry-run >dry.log
grep -qE '^# optimizer   muon, rate x 0.5, decay 0.1: [0-9]+ tensors, [0-9.]+k parameters' dry.log || { cat dry.log; fail "dry run"; }
# Its memory counts what is kept of each element: 12 bytes, 4 less with BF16 moments, 4 more with an average.
kept() { # kept BYTES OPTIMIZER MOMENTS EMA: 4 layers have 3.115 G parameters, 2.491 G of them Muon's
  pretrain dry --dry-run --set model.config="$PITH_SOURCE_DIR/examples/qwen3_30b_a3b" --set model.num_layers=4 \
    --set training.groups='[]' --set training.optimizer="$2" --set training.moments="$3" --set training.ema_decay="$4" |
    awk -v bytes="$1" '/^# memory/ { for (i = 1; i < NF; ++i) if ($i == "moments") got = $(i + 1) }
      END { d = got * 2 ^ 30 / bytes - 1; if (d > 0.01 || d < -0.01) { print got * 2 ^ 30, bytes; exit 1 } }' || fail "memory with $*"
}
kept 37.38e9 adamw float32 0
kept 24.92e9 adamw bfloat16 0
kept 49.84e9 adamw float32 0.9
kept 27.41e9 muon float32 0

# A checkpoint of WSD's stable phase goes on with a decay of another length and shape (known fault 43).
wsd=(--set training.schedule=wsd --set training.decay_steps=10 --set training.steps=20 --set training.min_lr_ratio=0)
train wsd "${wsd[@]}" --set checkpoint.interval=4 --set checkpoint.keep_last=0
mkdir -p decayed/checkpoints
cp -r wsd/checkpoints/step-00000004 decayed/checkpoints/
shorter=(--set training.steps=8 --set training.decay_steps=4 --set training.decay_shape=1-sqrt)
refused 'training.decay_shape: linear in the checkpoint, 1-sqrt now' pretrain decayed "${wsd[@]}" "${shorter[@]}"
train decayed "${wsd[@]}" "${shorter[@]}" --set checkpoint.allow_schedule_change=true
numbers decayed | grep lr | cut -d: -f2 | awk '{ d = $1 - 0.01 * (1 - sqrt(NR / 4)); if (d > 1e-12 || d < -1e-12) exit 1 } END { exit NR != 4 }' ||
  { numbers decayed; fail "the decay does not follow its closed form"; }

# Known fault 47. Byte 1 stands in one document only, and its row of the embedding is NaN: the steps that meet it have no
# finite loss, on one rank at first. All ranks skip them alike; nothing else changes but the data moves on.
printf 'a\001b' >text/bad.txt
"$PITHTRAIN" corpus build --out bad text >/dev/null
cp -r $model broken
rm broken/manifest.json
"${PYTHON:-python3}" - broken/model-00001-of-00001.safetensors <<'END'
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
length = struct.unpack("<Q", data[:8])[0]
entry = json.loads(data[8:8 + length])["model.embed_tokens.weight"]
at = 8 + length + entry["data_offsets"][0] + 1 * entry["shape"][1] * 4
data[at:at + 4] = struct.pack("<f", float("nan"))
open(sys.argv[1], "wb").write(data)
END
skip=(--set data.train=bad --set model.init=broken --set training.skip_non_finite=1 --set training.steps=22 --set training.schedule=constant
  --set checkpoint.interval=1 --set checkpoint.keep_last=0)
train skipped "${skip[@]}"
grep -q '^skipped: step [0-9]*: loss -*nan, gradient norm -*nan: no update; 1 in a row, 1 in all' skipped.log || { cat skipped.log; fail "nothing was skipped"; }
at=$(grep -oE '^skipped: step [0-9]+' skipped.log | head -n 1 | grep -oE '[0-9]+')
total=$(grep -c '"event":"skipped"' skipped/metrics.jsonl)
grep -q "\"updates\": $((22 - total))" skipped/checkpoints/step-00000022/training_state.json || fail "updates are not counted"
tail -n 2 skipped/metrics.jsonl | grep -q "\"skipped\":$total.0" || { tail -n 2 skipped/metrics.jsonl; fail "no total of skipped steps"; }
"$PITHTRAIN" launch 2 pretrain run.toml --set run.folder=skipped2 "${skip[@]}" >skipped2.log 2>&1 || { cat skipped2.log; fail "two ranks"; }
diff <(grep -o 'skipped: step [0-9]*' skipped.log) <(grep -o 'skipped: step [0-9]*' skipped2.log) || fail "two ranks skip other steps"
same_losses skipped skipped2 1e-3  # the rounding of 20 steps
for run in skipped skipped2; do
  now=$run/checkpoints/step-$(printf %08d "$at") before=$run/checkpoints/step-$(printf %08d $((at - 1)))
  for file in $(cd "$now" && find . -name '*.safetensors'); do
    cmp "$before/$file" "$now/$file" || fail "the skipped step changed $file of $run"
  done
done
refused 'step [0-9]+: loss -?nan and gradient norm -?nan are not finite; first NaN or Inf in weight model.embed_tokens.weight' \
  pretrain stopped "${skip[@]}" --set training.skip_non_finite=0
echo PASS
