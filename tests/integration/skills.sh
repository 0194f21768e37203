#!/usr/bin/env bash
# The check scripts of skills, where they pass and where they fail.
set -u
failures=0
fail() { echo "FAIL: $*: $(cat log)"; failures=$((failures + 1)); }
skills=$PITH_SOURCE_DIR/.agents/skills
unset MPIRUN
expect() {  # expect STATUS PATTERN COMMAND...: PASS or FAIL in the last line goes with the status
  local wanted=$1 pattern=$2 status=0
  shift 2
  "$@" >log 2>&1 || status=$?
  [ $status -eq "$wanted" ] || fail "exit $status of $*"
  grep -qE "$pattern" log || fail "no '$pattern' from $*"
  [ "$(tail -n 1 log)" = "$([ "$wanted" -eq 0 ] && echo PASS || echo FAIL)" ] || fail "last line of $*"
}

cat >run.toml <<TOML
[model]
config = "$PITH_SOURCE_DIR/examples/qwen3_30b_a3b/config.json"
[data]
train = "none"
[training]
global_batch = 64
TOML
choose() { "$skills/choose-layout/check.sh" "$PWD/run.toml" "$@"; }
expect 0 '^ep = 8' choose 8 141
expect 0 '^recompute = "layer"' choose 16 48
expect 0 '^ep = [12]$' choose 16 80 2
expect 1 'no layout fits 2 GPUs of 80 GiB; the smallest takes [0-9.]+ GiB' choose 2 80
expect 1 'no layout divides 53 GPUs' choose 53 80

memory() { "$skills/estimate-memory/check.sh" "$@"; }
expect 0 'layouts fit 8 GPUs' memory run.toml 8 139
expect 1 'no layout fits' memory run.toml 1 139
mkdir measured other
sed '/global_batch/a micro_batch = 1\n[parallel]\nep = 8' run.toml >measured/config.toml
estimated=$("$PITHTRAIN" pretrain measured/config.toml --dry-run --processes 8 --set run.device=cpu | sed -nE 's/^# memory +stage 0: ([0-9.]+).*/\1/p')
peak() { awk -v x="$estimated" -v f="$1" 'BEGIN { for (i = 1; i <= 2; ++i) printf "{\"step\":%d,\"memory_peak_gib\":%.3f}\n", i, i / 2 * f * x }' >measured/metrics.jsonl; }
peak 1.04
expect 0 '^-3\.[0-9] %' memory run.toml 8 139 --measured measured
peak 1.07
expect 1 '^-6\.[0-9] %' memory run.toml 8 139 --measured measured
expect 1 'measured nothing' memory run.toml 8 139 --measured other

model() { "$skills/add-new-model/check.sh" "$@"; }
expect 0 '^examples/deepseek_v2.toml, 64 processes: 236G total' model deepseek_v2
expect 1 'missing: models/llama.h' model llama

convert() { "$skills/convert-checkpoint/check.sh" "$PITH_SOURCE_DIR/tests/golden/$1" "${@:2}"; }
expect 0 '62 tensors, 62 equal' convert qwen3_moe_a same --shard-size 40kB
expect 0 '' convert gpt_oss_a half --dtype bfloat16 --layers 2
expect 0 '' convert qwen3_5_moe_a more --vocabulary 140 --reinit 'mlp\.gate\.weight$'
expect 1 'exists already' convert qwen3_moe_a same
expect 1 'cannot open' convert nowhere new

kernel() { "$skills/optimize-kernel/check.sh" "$@" --figures; }
bench() {  # bench FOLDER STEP_SECONDS GIB SWIGLU_MS ROTARY_MS
  mkdir -p "$1" && printf '{"steps": [{"name": "qwen3", "seconds": %s, "memory_gib": %s}],\n"operators": [
    {"name": "swiglu", "shape": "8 x 8", "ms": %s}, {"name": "rotary", "shape": "8 x 8", "ms": %s}]}\n' "${@:2}" >"$1/bench.json"
}
bench before 2.0 100 1.0 1.0
bench faster 1.9 100 0.9 1.01 && expect 0 '^swiglu, 8 x 8, ms .*0\.900' kernel before faster 'swiglu, 8 x 8'
expect 0 'qwen3, s a step' kernel before faster/bench.json qwen3
expect 1 'rotary, 8 x 8 takes 1.010 of its time before' kernel before faster 'rotary, 8 x 8'
expect 1 'there is no row "swiglu"' kernel before faster swiglu
bench slower 2.0 100 0.9 1.1 && expect 1 '^slower:' kernel before slower 'swiglu, 8 x 8'
bench larger 2.0 101 0.9 1.0 && expect 1 'it uses more memory' kernel before larger 'swiglu, 8 x 8'
expect 1 'cannot read' kernel before nowhere 'swiglu, 8 x 8'
expect 1 'check.sh BEFORE AFTER ROW' kernel before

# Two runs and a profile of a tiny model.
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
fail() { echo "FAIL: $*: $(cat log)"; failures=$((failures + 1)); }
tiny_text 20
"$PITHTRAIN" corpus build --out corpus text >/dev/null
tiny_config layers=2
cat >tiny.toml <<TOML
[run]
device = "cpu"
[model]
config = "config.json"
dtype = "float32"
[data]
train = "corpus"
sequence_length = 32
[training]
steps = 40
global_batch = 4
warmup_steps = 20
schedule = "wsd"
decay_steps = 10
TOML
profile() { PROFILE_FOLDER=profile "$skills/profile-run/check.sh" "$@"; }
expect 0 'computing [0-9.]+, communication' profile tiny.toml --set training.micro_batch=2
expect 1 'unknown key' profile tiny.toml --set training.nonsense=1
expect 0 'trace-rank1.json' profile tiny.toml 2 --set parallel.ep=2
runs() { "$skills/compare-runs/check.sh" "$@"; }
short=(--set training.steps=3 --set training.schedule=constant --set training.decay_steps=0 --set training.warmup_steps=0 --set checkpoint.save=false)
for run in a b; do "$PITHTRAIN" pretrain tiny.toml "${short[@]}" --set run.folder=$run >/dev/null; done
"$PITHTRAIN" pretrain tiny.toml "${short[@]}" --set run.folder=c --set training.lr=1e-2 >/dev/null
expect 0 '4 curves, 4 equal' runs a b
expect 0 'compare.html: 2 runs' runs a c 1000
expect 1 'loss' runs a c 1e-4
expect 1 'holds no metrics.jsonl' runs a other

hang() { "$skills/debug-hang/check.sh" "$@"; }
export PITH_HEARTBEAT_S=4
expect 0 'fine' hang 10 echo fine
expect 1 'status 3' hang 10 sh -c 'exit 3'
PITH_TEST_FAILURE=throw expect 1 'FAILED rank 2: no row 7' hang 60 "$PITHTRAIN" launch 3 --program "$PITH_BUILD_DIR/test_parallel" go
PITH_TEST_FAILURE=loop expect 1 'process [0-9]+, rank 2: ' hang 30 "$PITHTRAIN" launch 3 --program "$PITH_BUILD_DIR/test_parallel" go
[ $failures -eq 0 ] && echo "PASS"
exit $((failures > 0))
