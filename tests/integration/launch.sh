#!/usr/bin/env bash
# pithtrain launch: prefixes, a stop that lets ranks finish, a failing and a killed rank, its own death.
set -u
failures=0
fail() { echo "FAIL: $*: $(cat log)"; failures=$((failures + 1)); }
export PITH_HEARTBEAT_S=4
unset MPIRUN  # it has to find the one of .deps

begin() {  # begin SCENARIO: starts three ranks, waits until all are there
  PITH_TEST_FAILURE=$1 "$PITHTRAIN" launch 3 --program "$PITH_BUILD_DIR/test_parallel" go >log 2>&1 &
  job=$!
  for _ in $(seq 1 200); do
    [ "$(grep -c ' pid ' log)" -eq 3 ] && break
    sleep 0.1
  done
  sleep 1
}
pid_of() { sed -nE "s/^\[$1\] rank $1 pid ([0-9]+)$/\1/p" log; }

for signal in TERM INT; do
  [ $signal = INT ] && set -m  # else the shell starts background jobs with SIGINT ignored
  begin loop
  kill -$signal $job
  wait $job || fail "$signal: exit status $?"
  set +m
  [ "$(grep -oE '^\[[012]\] saved after step [0-9]+$' log | sed 's/^\[.\]//' | sort | uniq -c | wc -l)" -eq 1 ] ||
    fail "$signal: not all ranks saved after the same step"
  [ "$(grep -c 'saved after' log)" -eq 3 ] || fail "$signal: not every rank had time to save"
done

begin throw
wait $job && fail "throw: exit status 0"
[ "$(grep -c 'FAILED' log)" -eq 1 ] || fail "throw: not one cause"
grep -q '^\[2\] FAILED rank 2: no row 7 in the corpus' log || fail "throw: another cause"
grep -q 'mpirun says' log && fail "throw: mpirun speaks as well"

begin loop
kill -9 "$(pid_of 1)"
wait $job && fail "kill: exit status 0"
grep -qE 'FAILED rank|signal 9' log || fail "kill: no cause"

begin loop
pids="$(pid_of 0) $(pid_of 1) $(pid_of 2)"
kill -9 $job
for _ in $(seq 1 50); do
  left=0
  for pid in $pids; do kill -0 "$pid" 2>/dev/null && left=1; done
  [ $left -eq 0 ] && break
  sleep 0.2
done
[ $left -eq 0 ] || fail "ranks outlive the launcher"

printf '#!/bin/sh\necho "threads $OMP_NUM_THREADS for $*"\n' >say.sh
chmod +x say.sh
"$PITHTRAIN" launch 2 --program ./say.sh pretrain --dry-run >log 2>&1 || fail "say.sh: exit status $?"
[ "$(grep -cE '^\[[01]\] threads [0-9]+ for pretrain --dry-run$' log)" -eq 2 ] || fail "prefixes"
[ $failures -eq 0 ] && echo "PASS"
exit $((failures > 0))
