#!/usr/bin/env bash
# A rank that is killed, stopped, throws, differs or stays away: every process ends soon, nonzero, and exactly one
# line names the first cause. Once under mpirun, which ends ranks itself when one ends, and once without any
# launcher, in torchrun's environment, where the heartbeat has to do it.
set -u
program=$PITH_BUILD_DIR/test_parallel
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }
export PITH_HEARTBEAT_S=4
ranks=3

start() {  # start mpi|plain SCENARIO: sets $job, the processes to wait for
  export PITH_TEST_FAILURE=$2 PITH_COMM_TIMEOUT_S=60
  [ "$2" = absent ] && PITH_COMM_TIMEOUT_S=3
  if [ "$1" = mpi ]; then
    "$MPIRUN" -n $ranks --oversubscribe --bind-to none "$program" >log 2>&1 &
    job=($!)
    return
  fi
  local port=$((20000 + RANDOM % 20000)) rank
  job=()
  : >log
  for ((rank = 0; rank < ranks; ++rank)); do
    RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$program" >>log 2>&1 &
    job+=($!)
  done
}

runs() { grep -qsE '^State:\s+[^ZX]' "/proc/$1/status"; }  # a process not yet reaped has ended
pid_of() { sed -nE "s/.*rank $1 pid ([0-9]+).*/\1/p" log; }

# expect WHERE SCENARIO SIGNAL RANK PATTERN: the signal goes to the rank after the start ("" = none).
expect() {
  local where=$1 scenario=$2 signal=$3 rank=$4 pattern=$5 name="$1, $2 $3 $4" pid status began=$SECONDS r victim=""
  start "$where" "$scenario"
  for _ in $(seq 1 200); do
    [ "$(grep -c ' pid ' log)" -eq $ranks ] && break
    sleep 0.1
  done
  local pids
  pids=$(sed -nE 's/.* pid ([0-9]+).*/\1/p' log)
  if [ -n "$signal" ]; then
    sleep 1
    victim=$(pid_of "$rank")
    kill -"$signal" "$victim" || fail "$name: no process to signal"
  fi
  for pid in "${job[@]}"; do
    if [ "$pid" = "$victim" ] && [ "$signal" = STOP ]; then continue; fi
    status=0
    wait "$pid" 2>/dev/null || status=$?
    [ $status -ne 0 ] || fail "$name: a process ended with status 0"
  done
  if [ "$where" = plain ] && [ "$signal" = STOP ]; then kill -9 "$victim"; wait "$victim" 2>/dev/null; fi
  [ $((SECONDS - began)) -le 40 ] || fail "$name: took $((SECONDS - began)) s"
  for pid in $pids; do
    for _ in $(seq 1 100); do runs "$pid" && sleep 0.1; done
    runs "$pid" && { fail "$name: process $pid is left"; kill -9 "$pid"; }
  done
  grep -qE "$pattern" log || fail "$name: no '$pattern' in: $(cat log)"
  local most=1  # without the store of rank 0 and without a launcher each survivor says it
  [ "$where" = plain ] && [ "$rank" = 0 ] && most=2
  [ "$(grep -c 'FAILED rank' log)" -le $most ] || fail "$name: more than one cause in: $(cat log)"
  echo "$name: $((SECONDS - began)) s: $(grep -E -m1 "$pattern" log)"
}

for where in mpi plain; do
  expect $where throw "" "" "FAILED rank 2: no row 7 in the corpus"
  expect $where differ "" "" "FAILED rank [012]: configuration of rank 0 and of ranks \[2\] differ; line 1: 'lr = 1' and 'lr = 2'"
  expect $where absent "" "" "FAILED rank [01]: timeout: all_(reduce|gather_strings) #.* group world \[0, 1, 2\], step 20.* after 3 s"
  expect $where loop STOP 1 "FAILED rank 0: rank 1 has given no sign of life for 4 s"
  expect $where loop STOP 0 "FAILED rank 1: rank 0 has (not answered|given no sign of life) for 4 s"
done
expect mpi loop KILL 1 "signal 9"
expect plain loop KILL 1 "FAILED rank 0: rank 1 has given no sign of life for 4 s"
expect plain loop KILL 0 "FAILED rank 1: rank 0 has ended or lost its connection"

start plain end
for pid in "${job[@]}"; do wait "$pid" || fail "a job without a fault ended with status $?: $(cat log)"; done
[ $failures -eq 0 ] && echo "PASS"
exit $((failures > 0))
