#!/usr/bin/env bash
# check.sh SECONDS COMMAND...: runs the command with short limits; says why it failed, or what its processes do when it
# does not end. PASS when it ended with status 0, else FAIL.
set -uo pipefail
[[ $# -ge 2 && "$1" =~ ^[0-9]+$ ]] || { sed -n '2,3s/^# //p' "$0"; exit 1; }
seconds=$1
shift
export PITH_COMM_TIMEOUT_S=${PITH_COMM_TIMEOUT_S:-30} PITH_HEARTBEAT_S=${PITH_HEARTBEAT_S:-10}
export PITH_HANG_CHECK=$$.$RANDOM  # by which the job's processes are known, wherever they were started
log=$(mktemp)
trap 'rm -f "$log"' EXIT

processes() {
  local environ
  for environ in /proc/[0-9]*/environ; do
    grep -qzxF "PITH_HANG_CHECK=$PITH_HANG_CHECK" "$environ" 2>/dev/null || continue
    environ=${environ#/proc/}
    [ "${environ%/environ}" != $$ ] && echo "${environ%/environ}"
  done
}

"$@" >"$log" 2>&1 &
job=$!
for ((i = 0; i < 5 * seconds; ++i)); do
  kill -0 $job 2>/dev/null || break
  sleep 0.2
done
if kill -0 $job 2>/dev/null; then
  echo "it still runs after $seconds s; its last lines:"
  tail -n 5 "$log"
  for pid in $(processes); do
    [ -r "/proc/$pid/status" ] || continue
    rank=$(tr '\0' '\n' <"/proc/$pid/environ" | sed -nE 's/^(OMPI_COMM_WORLD_RANK|RANK)=//p' | head -n 1)
    echo "process $pid, rank ${rank:-none}: $(sed -nE 's/^State:\s+//p' "/proc/$pid/status"), $(tr '\0' ' ' <"/proc/$pid/cmdline" | cut -c1-100)"
    if [ -n "$rank" ] && command -v gdb >/dev/null; then
      gdb -p "$pid" -batch -ex 'thread apply all bt 12' 2>/dev/null | grep -E '^(Thread|#)' | cut -c1-140
    fi
  done
  kill $job 2>/dev/null
  sleep 2
  kill -9 $(processes) 2>/dev/null
  wait $job 2>/dev/null
  echo FAIL
  exit 1
fi
wait $job
status=$?
if [ $status -ne 0 ]; then
  echo "it ended with status $status; the cause:"
  grep -A 20 -m1 'FAILED rank' "$log" || tail -n 10 "$log"
  echo FAIL
  exit 1
fi
tail -n 2 "$log"
echo PASS
