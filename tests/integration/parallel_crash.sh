#!/usr/bin/env bash
# kill -9 of each of 8 processes in turn, at random moments of a save: the others end soon, there is always a complete
# newest checkpoint, and the job that was killed and resumed again and again ends with the bytes and the losses of one
# that never was.
set -eu
RANDOM=5
fail() { echo "FAIL: $*"; exit 1; }
unset MPIRUN  # launch has to find the one of .deps
export PITH_HEARTBEAT_S=6
export TEST_TMP=${TEST_TMP:-$PWD}

. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
tiny_text 60
"$PITHTRAIN" corpus build --out corpus/train text >/dev/null
tiny_config layers=4
tiny_toml corpus/train <<'TOML'
[training]
steps = 100000
global_batch = 16
micro_batch = 1
schedule = "constant"
deterministic = true
[checkpoint]
interval = 1
[log]
tensorboard = false
[parallel]
pp = 2
ep = 2
TOML
train() { exec "$PITHTRAIN" launch 8 pretrain run.toml --set run.folder="$1" "${@:2}"; }  # in a subshell
newest() { ls killed/checkpoints 2>/dev/null | grep '^step-' | tail -n 1; }  # names sort by step
pid_of_rank() {  # of this test's job
  local environ
  for environ in /proc/[0-9]*/environ; do
    grep -qzxF "TEST_TMP=$TEST_TMP" "$environ" 2>/dev/null || continue
    grep -qzxF "OMPI_COMM_WORLD_RANK=$1" "$environ" 2>/dev/null || continue
    environ=${environ#/proc/}
    echo "${environ%/environ}"
    return
  done
}

last=""
for rank in 0 1 2 3 4 5 6 7; do
  train killed >killed.log 2>&1 &
  job=$!
  for wait in $(seq 1 1200); do  # until this job has saved for the first time
    [ "$(newest)" != "$last" ] && break
    kill -0 $job 2>/dev/null || { tail killed.log; fail "training ended by itself"; }
    sleep 0.05
  done
  [ "$wait" -lt 1200 ] || fail "no checkpoint within a minute"
  victim=$(pid_of_rank $rank)
  [ -n "$victim" ] || fail "no process of rank $rank"
  for _ in $(seq 1 2000); do compgen -G 'killed/checkpoints/.saving-*' >/dev/null && break; done
  sleep "0.0$(printf %02d $((RANDOM % 40)))"
  kill -9 "$victim"
  began=$SECONDS
  if wait $job; then fail "rank $rank was killed, and the job ended with status 0"; fi
  [ $((SECONDS - began)) -le 60 ] || fail "rank $rank was killed, the others ended after $((SECONDS - began)) s"
  now=$(newest)
  [[ "$now" > "$last" || "$now" = "$last" ]] || fail "rank $rank: $last was there, now $now is newest"
  "$PITHTRAIN" inspect "killed/checkpoints/$now" >inspect.log 2>&1 || { cat inspect.log; fail "$now is damaged"; }
  last=$now
done

step=$((10#${last#step-}))
end=$((step + 2))
(train killed --set training.steps=$end) >killed.log 2>&1 || { tail killed.log; fail "the last resume"; }
(train straight --set training.steps=$end --set checkpoint.interval=0) >straight.log 2>&1 ||
  { tail straight.log; fail "the straight run"; }
final=checkpoints/step-$(printf %08d $end)
diff -r -x run.toml -x manifest.json "killed/$final" "straight/$final" || fail "the straight run ends with other bytes"
losses() { grep '"loss"' "$1/metrics.jsonl" | grep -oE '"(step|loss|grad_norm|tokens_seen)":[^,]*'; }
diff <(losses killed) <(losses straight) || fail "losses differ from the straight run's"
leftovers=$(ls -A killed/checkpoints | grep -v '^step-' || true)
[ -z "$leftovers" ] || fail "left over: $leftovers"
echo "PASS: each of 8 ranks killed, $end steps"
