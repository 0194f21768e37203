#!/usr/bin/env bash
# A whole small run through the program: train, stop by a signal, resume, validate, trace, generate; and what it
# refuses. In a folder with a space and an umlaut in its name.
set -eu
fail() { echo "FAIL: $*"; exit 1; }
mkdir 'fol der ü' && cd 'fol der ü'

. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
tiny_text 80
"$PITHTRAIN" corpus build --out corpus/train --validation-share 0.2 --validation-out corpus/held text >/dev/null
tiny_config positions=96
tiny_toml corpus/train <<'END'
validation = "corpus/held"
[training]
steps = 20
global_batch = 8
micro_batch = 4
lr = 1e-2
warmup_steps = 3
[validation]
tokens = 1024
END
train() { "$PITHTRAIN" pretrain run.toml --set run.folder="$1" "${@:2}"; }
train_in_background() { exec "$PITHTRAIN" pretrain run.toml --set run.folder="$1" "${@:2}"; }  # $! is the program
numbers() { grep '"loss"' "$1/metrics.jsonl" | grep -oE '"(step|loss|grad_norm|lr|tokens_seen)":[^,}]*'; }
refused() { # refused PATTERN COMMAND...: must exit 1 and say PATTERN
  local pattern=$1 status=0
  shift
  "$@" >refused.log 2>&1 || status=$?
  [ $status -eq 1 ] || { cat refused.log; fail "exit $status instead of 1: $*"; }
  grep -qE "$pattern" refused.log || { cat refused.log; fail "no '$pattern' from: $*"; }
  ! grep -q 'frame #' refused.log || fail "a backtrace reached the user: $*"
}

# Straight; and 10 steps + a new process + 10 steps.
train straight >straight.log
grep -q 'step 20/20' straight.log || fail "no progress line"
train_in_background resumed --set checkpoint.interval=10 >resumed.log 2>&1 &
process=$!
for _ in $(seq 1 600); do [ -e resumed/checkpoints/step-00000010 ] && break; sleep 0.05; done
kill -9 $process 2>/dev/null || true
wait $process 2>/dev/null || true
train resumed >>resumed.log
grep -q 'resumed from' resumed.log || fail "it did not resume"
diff <(numbers straight) <(numbers resumed) || fail "resuming changed the numbers"
for file in $(cd straight/checkpoints/step-00000020 && find . -name '*.safetensors'); do
  cmp "straight/checkpoints/step-00000020/$file" "resumed/checkpoints/step-00000020/$file" || fail "$file differs"
done

# A profile does not change training; the trace is JSON, the summary names operators.
train profiled --set profile.steps=[3,4] >profiled.log 2>&1
diff <(numbers straight) <(numbers profiled) || fail "profiling changed training"
"${PYTHON:-python3}" -m json.tool profiled/trace-rank0.json >/dev/null || fail "the trace is not JSON"
grep -qE '^[0-9.]+ ms: computing [0-9.]+, communication 0.00' profiled/profile-rank0.txt || fail "no summary"
grep -q 'aten::mm' profiled/profile-rank0.txt || fail "the profile does not name aten::mm"

# Validation does not change training; the loss falls; held-out loss is reported.
train validated --set validation.interval=5 >validated.log
diff <(numbers straight) <(numbers validated) || fail "validation changed training"
[ "$(grep -c '"validation/loss"' validated/metrics.jsonl)" -eq 4 ] || fail "4 validation losses expected"
grep -q 'validation: held loss [0-9.]*, perplexity [0-9.]*; mean loss' validated.log || fail "no line of validation"
grep '"loss"' straight/metrics.jsonl | grep -oE '"loss":[0-9.]+' | cut -d: -f2 |
  awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(last < 0.8 * first) }' || fail "the loss does not fall"

# Balancing by a bias and by the loads of the whole batch before: state of the router, which is part of the weights.
balance=(--set training.balance_kind=global_batch --set training.router_bias_rate=0.01 --set training.z_loss=1e-3
  --set log.expert_counts=5 --set training.schedule=constant)
train biased "${balance[@]}" >biased.log
train biased_halves "${balance[@]}" --set training.steps=10 >biased_halves.log
train biased_halves "${balance[@]}" >>biased_halves.log
diff <(numbers biased) <(numbers biased_halves) || fail "resuming changed the numbers of a router with a bias"
weights=biased/checkpoints/step-00000020
diff -r $weights biased_halves/checkpoints/step-00000020 -x run.toml -x manifest.json || fail "resuming changed the router's state"
[ "$(grep -c '"counts"' biased/metrics.jsonl)" -eq 4 ] || fail "4 records of all experts' tokens expected"
[ "$(grep -c '"max_over_mean"' biased/metrics.jsonl)" -eq 20 ] || fail "no loads of experts"
grep -q '"z_loss"' biased/metrics.jsonl || fail "no z-loss"
cp -r $weights unbiased
"${PYTHON:-python3}" - unbiased/config.json <<'END'
import json, sys
config = json.load(open(sys.argv[1]))
state = config.pop("router_state")
assert any(state["bias"][0]) and abs(sum(state["shares"][0]) - 1) < 1e-12, state
json.dump(config, open(sys.argv[1], "w"))
END
echo '[[[1, 2, 3, 4, 5, 6, 7, 8]]]' >some.json
for folder in $weights unbiased; do
  "$PITHTRAIN" trace $folder --tokens some.json --out "$(basename $folder).safetensors" --routing >/dev/null
done
! cmp -s step-00000020.safetensors unbiased.safetensors || fail "the bias changes no route"

"${PYTHON:-python3}" - unbiased/config.json <<'END'
import json, sys
config = json.load(open(sys.argv[1]))
config["router_state"] = {"bias": [[0.5, 0.5, 0.5]]}
json.dump(config, open(sys.argv[1], "w"))
END
# A router of another model is refused.
refused 'router_state of the weights' train foreign --set model.init=unbiased

# SIGTERM: finishes the step, saves, exits 0; and goes on where it stopped.
train_in_background stopped --set training.steps=100000 --set training.schedule=constant >stopped.log 2>&1 &
process=$!
for _ in $(seq 1 600); do grep -q 'step  *5/' stopped.log && break; sleep 0.05; done
kill -TERM $process
wait $process || { status=$?; tail stopped.log; fail "exit $status after SIGTERM"; }
last=$(ls stopped/checkpoints | tail -n 1)
stopped_at=$((10#${last#step-}))
train stopped --set training.steps=$((stopped_at + 2)) --set training.schedule=constant >stopped2.log
grep -q "at step $stopped_at" stopped2.log || fail "resumed elsewhere than at step $stopped_at"

# Another shape of the learning rate is an explicit choice, key by key; a constant rate does not depend on steps.
refused 'training.steps: 20 in the checkpoint, 25 now' train straight --set training.steps=25
refused 'training.lr: 0.01 in the checkpoint, 0.002 now' train straight --set training.lr=2e-3
train resumed --set training.steps=22 --set checkpoint.allow_schedule_change=true >changed.log
grep -q 'training.steps: 20 in the checkpoint, 22 now' changed.log || fail "the change is not logged"
[ -e resumed/checkpoints/step-00000022 ] || fail "it did not go on to step 22"
train resumed --set training.steps=22 >again.log || fail "the change was not saved"

# A blend, packed: resumes to the same numbers; validation per corpus, the same for any micro-batch; what changed is named.
for i in $(seq 1 30); do seq 1000 $((1000 + i * 7)) >"text/b$i.txt"; done
"$PITHTRAIN" corpus build --out corpus/b --validation-share 0.3 --validation-out corpus/held_b text/b*.txt >/dev/null
blend() { # blend FOLDER [--set ...]
  train "$@" --set 'data.train=[{path = "corpus/train", weight = 0.7}, {path = "corpus/b", weight = 0.3}]' \
    --set 'data.validation=[{path = "corpus/held"}, {path = "corpus/held_b", name = "b"}]' \
    --set data.packing=best_fit --set validation.interval=10
}
blend blend >blend.log
grep -qE 'data: corpus/b: 30 % of the rows; an epoch is [0-9]+ tokens in [0-9]+ rows' blend.log ||
  { cat blend.log; fail "the blend is not described"; }
blend halves --set checkpoint.interval=10 >/dev/null
rm -r halves/checkpoints/step-00000020
blend halves >halves.log
grep -q 'at step 10' halves.log || fail "the blend did not resume at step 10"
diff <(numbers blend) <(numbers halves) || fail "resuming changed the numbers of a blend"
validations() { grep '"loss"' "$1/metrics.jsonl" | grep -oE '"validation/[^,}]*'; }
[ "$(validations blend | cut -d: -f1 | sort -u | tr -d '\n"')" = \
  validation/b/lossvalidation/b/perplexityvalidation/held/lossvalidation/held/perplexityvalidation/loss ] || fail "names"
blend one --set training.micro_batch=1 >/dev/null
paste -d: <(validations blend) <(validations one) |
  awk -F: '{ d = $2 / $4 - 1; if (d > 1e-4 || d < -1e-4) exit 1 }' || fail "validation depends on the micro-batch"
refused 'corpus 2 of data.train: fingerprint' env -C . bash -c \
  "mv corpus/b.idx b.idx; mv corpus/b.bin b.bin; mv corpus/b.json b.json;
   for e in idx bin json; do cp corpus/held_b.\$e corpus/b.\$e; done;
   '$PITHTRAIN' pretrain blend/config.toml"
for e in idx bin json; do mv b.$e corpus/b.$e; done
refused 'corpus 1 of data.train: weight, as an integer ratio: 7 in the checkpoint, 1 now' \
  "$PITHTRAIN" pretrain blend/config.toml --set 'data.train=[{path = "corpus/train"}, {path = "corpus/b"}]'
refused 'data.packing: best_fit in the checkpoint, concat now' \
  "$PITHTRAIN" pretrain blend/config.toml --set data.packing=concat

# The end of the data ends the run, with a save.
train once --set data.train=corpus/b --set data.exhausted=stop --set training.steps=10000 >once.log
grep -q 'a corpus ends after step [0-9]* of 10000' once.log || fail "the end of the data is not foretold"
[ "$(ls once/checkpoints | wc -l)" -eq 1 ] || fail "no save at the end of the data"

# What is refused.
refused 'data.sequence_length: 32 in the checkpoint, 16 now' train straight --set data.sequence_length=16
refused 'checkpoint.resume is off' train straight --set checkpoint.resume=false
refused 'longer than the model' train other --set data.sequence_length=128
refused 'a pipeline of 2 ranks needs at least 4 micro-batches a step, there are 2' \
  "$PITHTRAIN" pretrain run.toml --dry-run --processes 2 --set parallel.pp=2
refused 'parallel.recompute must be' "$PITHTRAIN" pretrain run.toml --dry-run --set parallel.recompute=layer,layer
refused 'vocabulary of 257, the model only 100' env -C . bash -c \
  "sed 's/257/100/' config.json >small.json; '$PITHTRAIN' pretrain run.toml --set model.config=small.json"
refused 'attention_bias true is not supported' bash -c \
  "sed 's/\"tie_word/\"attention_bias\": true, \"tie_word/' config.json >bias.json; '$PITHTRAIN' pretrain run.toml --set model.config=bias.json"
refused 'model_type "llama" is not supported' bash -c \
  "sed 's/qwen3_moe/llama/' config.json >llama.json; '$PITHTRAIN' pretrain run.toml --set model.config=llama.json"

# A run that leaves the finite numbers stops, names the first tensor, and keeps its checkpoint.
refused 'step [0-9]+: loss .* not finite; first NaN or Inf in (output|weight|gradient)' \
  train exploded --set training.lr=1000 --set training.clip_norm=0 --set training.weight_decay=1 --set training.steps=60 --set training.schedule=constant

# Weights alone from a checkpoint: step 0 of a new run starts at the trained loss.
train continued --set model.init=straight/checkpoints/step-00000020 --set training.steps=1 --set training.warmup_steps=0 --set training.lr=1e-8 >/dev/null
awk -v a="$(numbers straight | grep loss | tail -n 1 | cut -d: -f2)" -v b="$(numbers continued | grep loss | cut -d: -f2)" \
  'BEGIN { exit !(b < a * 1.3 && b > a * 0.7) }' || fail "model.init was not used"

# Dry run: everything resolved, nothing written.
train dry --dry-run >dry.log
grep -q '^# memory .*stage 0' dry.log && grep -q '^# schedule' dry.log && grep -q '^# parameters' dry.log || fail "dry run"
[ ! -e dry ] || fail "the dry run wrote a folder"

# Generation: greedy with and without cache; alone and in a batch; the same seed the same text; end of document.
model=straight/checkpoints/step-00000020
generate() { "$PITHTRAIN" generate $model --device cpu --max-tokens 40 "$@"; }
generate --prompt '12' --temperature 0 >a.txt
generate --prompt '12' --temperature 0 --no-cache >b.txt
cmp a.txt b.txt || fail "the cache changes greedy text"
generate --prompt '12' --prompt '3141' --prompt '9' --temperature 0 >batch.txt
tail -n +2 batch.txt | head -c "$(($(wc -c <a.txt) - 1))" | cmp - <(head -c -1 a.txt) || fail "a batch changes greedy text"
generate --prompt '12' --seed 5 >c.txt
generate --prompt '12' --seed 5 >d.txt
generate --prompt '12' --seed 6 >e.txt
cmp c.txt d.txt || fail "the same seed gave another text"
! cmp -s c.txt e.txt || fail "another seed gave the same text"
refused 'would take [0-9]+ positions, the model has 96' "$PITHTRAIN" generate $model --prompt x --max-tokens 500

# Trace: the loss of the same rows in FP32, gradients, routing; ids that do not fit are refused.
echo '{"rows": [[[49, 10, 50, 10], [51]], [[52, 53, 10]]]}' >ids.json
"$PITHTRAIN" trace $model --tokens ids.json --out trace.safetensors --grads --stages --routing >trace.log
grep -q 'loss [0-9.]* over 5 trained tokens' trace.log || { cat trace.log; fail "trace"; }
"$PITHTRAIN" inspect trace.safetensors >inspect.log
for name in logits loss logprobs grad.lm_head.weight grad.model.layers.1.mlp.experts.3.up_proj.weight routing.topk_idx.0; do
  grep -aq "\"$name\"" trace.safetensors || fail "the trace lacks $name"
done
echo '[[[1, 300]]]' >bad.json
refused 'bad.json: row 0, document 0: 300 is not an id below the vocabulary of 257' \
  "$PITHTRAIN" trace $model --tokens bad.json --out t.safetensors
echo "PASS"
