#!/usr/bin/env bash
# benchmarks/node.sh on eight processes of a CPU: every layout of the three families runs to its end, and JSON and table hold
# what a machine with GPUs is to report. What fails or has no time left does not stop the others.
set -eu
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
tiny_text 60
"$PITHTRAIN" corpus build --out corpus text >/dev/null
export OUT="$PWD/out" RUNS="$PWD/runs" DATA="$PWD/corpus" STEPS=3
names="deepseek-pp4-ep2 qwen3-ep8-reshard gpt_oss-ep4-dp2 deepseek-ep8 qwen3-pp2-ep4 deepseek-fsdp8"
node() { bash "$PITH_SOURCE_DIR/benchmarks/node.sh" --cpu 8 "$@"; }

node >table 2>log || { cat log table out/*.log; fail "node.sh"; }
[ "$(grep -oE '^\| [a-z][a-z0-9_-]*-[a-z0-9-]+' table | cut -c 3- | tr '\n' ' ')" = "$names " ] || { cat table; fail "rows of the table"; }
[ "$(grep -cE '^\| .* \| ok \|$' table)" -eq 6 ] || { cat table; fail "not every run is ok"; }
"${PYTHON:-python3}" - out/node.jsonl $names <<'PYTHON'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
assert [run["name"] for run in lines] == sys.argv[2:], lines
for run in lines:
    for key in ("model", "layout", "weights", "recompute", "chunks"):
        assert run[key], (key, run)
    for key in ("layers", "gpus", "tokens_per_second", "mfu", "median_seconds", "first_step_seconds", "flop_per_token", "global_batch", "micro_batch", "sequence"):
        assert run[key] > 0, (key, run)
    for key in ("memory_gib", "idle_share", "exposed_ms", "computing_ms", "communication_ms", "idle_ms"):
        assert len(run[key]) == 8 and None not in run[key], (key, run)
    assert min(run["memory_gib"]) > 0 and max(run["idle_share"]) < 1, run
    stages = int(run["layout"].split()[1].strip(","))
    assert len(run["bubble_simulated"]) == stages and (stages == 1) == (max(run["bubble_simulated"]) == 0), run
    assert run["status"] == "ok" and run["steps"] == 3 and run["loss"][1] < 6, run
    for key in ("hidden_share", "predicted_seconds", "predicted_tokens_per_second", "predicted_memory_gib"):
        assert run[key] is None, (key, run)  # a CPU's transfers are not in its profile, and the cost model is one of H200
PYTHON

# The median is of steps 6 to 11 of 12: neither the slow first ones nor the profiled last one.
for step in $(seq 12); do echo "{\"step\":$step,\"loss\":1.5,\"seconds\":$([ "$step" -ge 6 ] && [ "$step" -lt 12 ] && echo "0.$((30 - step))" || echo 99)}"; done >x.metrics.jsonl
awk -v steps=12 -v table=table -f "$PITH_SOURCE_DIR/benchmarks/node_record.awk" x.metrics.jsonl | grep -q '"median_seconds":0.2100,"first_step_seconds":99,' || fail "the median"

# Timed anew with equal chunks and no head, the schedule has the bubble that the program itself prints.
"$PITHTRAIN" schedule --pp 4 --microbatches 16 >schedule
mine=$(awk -v P=4 -v chunks=1,1,1,1,1,1,1,1 -v head=0 -v share=0 -f "$PITH_SOURCE_DIR/benchmarks/simulate.awk" schedule | sed 's/.*\[//; s/\]//' | tr ',' '\n' |
  awk '{ printf "%.1f ", 100 * $1 }')
[ "$mine" = "$(sed -nE 's/.*\(([0-9.]+) %\), at most.*/\1/p' schedule | tr '\n' ' ')" ] || fail "bubble $mine: $(grep bubble schedule)"

BUDGET=1 ONLY=deepseek-ep8 node >table 2>log || fail "no time left: $(cat log)"
grep -q 'not run: no time left' table || { cat table; fail "ran without time"; }
ONLY="gpt_oss-ep4-dp2" node model.dtype=float17 >table 2>log && fail "a wrong value is ok"
grep -q 'float17' table || { cat table log; fail "the cause of a failure is not in the table"; }
bash "$PITH_SOURCE_DIR/benchmarks/node.sh" plan --gpus 8 --memory 139 >table 2>log || fail "plan: $(cat log)"
[ "$(grep -cE '^\| [^|]* \| (27|48|24) \|.*\| \([0-9]{6}\) \|.* planned \|$' table)" -eq 6 ] || { cat table log; fail "the plan for eight H200"; }
echo PASS
