#!/usr/bin/env bash
# kill -9 at 20 random moments around a save: there is always a complete newest checkpoint, and the run that was
# killed and resumed again and again ends with the bytes and the losses of a run that never was.
set -eu
RANDOM=11
fail() { echo "FAIL: $*"; exit 1; }

. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
tiny_text 60
"$PITHTRAIN" corpus build --out corpus/train text >/dev/null
tiny_config
tiny_toml corpus/train <<'END'
[training]
steps = 100000
global_batch = 4
micro_batch = 2
schedule = "constant"
deterministic = true
[checkpoint]
interval = 1
[log]
tensorboard = false
END
train() { exec "$PITHTRAIN" pretrain run.toml --set run.folder=\""$1"\" "${@:2}"; }  # in a subshell
newest() { ls killed/checkpoints 2>/dev/null | grep '^step-' | tail -n 1; }  # names sort by step

last=""
for kill_number in $(seq 1 20); do
  train killed >>killed.log 2>&1 &  # exec: the process killed is the program itself
  process=$!
  for wait in $(seq 1 1200); do  # until this process has saved for the first time
    [ "$(newest)" != "$last" ] && break
    kill -0 $process 2>/dev/null || { tail killed.log; fail "training ended by itself"; }
    sleep 0.05
  done
  [ "$wait" -lt 1200 ] || fail "no checkpoint within a minute"
  sleep "0.$(printf %03d $((RANDOM % 150)))"
  kill -9 $process
  wait $process 2>/dev/null || true
  now=$(newest)
  [[ "$now" > "$last" || "$now" = "$last" ]] || fail "kill $kill_number: $last was there, now $now is newest"
  "$PITHTRAIN" inspect "killed/checkpoints/$now" >inspect.log 2>&1 || { cat inspect.log; fail "$now is damaged"; }
  last=$now
done

step=$((10#${last#step-}))
end=$((step + 3))
(train killed --set training.steps=$end) >>killed.log 2>&1 || { tail killed.log; fail "the last resume"; }
(train straight --set training.steps=$end --set checkpoint.interval=0) >straight.log 2>&1 ||
  { tail straight.log; fail "the straight run"; }

final=checkpoints/step-$(printf %08d $end)
for file in $(cd "straight/$final" && find . -name '*.safetensors' -o -name 'training_state.json'); do
  cmp "killed/$final/$file" "straight/$final/$file" || fail "$file differs from the straight run's"
done
steps_of() { grep '"loss"' "$1/metrics.jsonl" | grep -oE '"(step|loss|grad_norm|tokens_seen)":[^,]*'; }
diff <(steps_of killed) <(steps_of straight) || fail "losses differ from the straight run's"
[ "$(steps_of straight | grep -c '"step"')" -eq $end ] || fail "metrics.jsonl lacks steps"
leftovers=$(ls -A killed/checkpoints | grep -v '^step-' || true)
[ -z "$leftovers" ] || fail "left over: $leftovers"
[ "$(ls killed/checkpoints | wc -l)" -eq 2 ] || fail "keep_last = 2, but: $(ls killed/checkpoints)"
echo "PASS: 20 kills in $end steps"
