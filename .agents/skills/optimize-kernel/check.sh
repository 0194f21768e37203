#!/usr/bin/env bash
# check.sh BEFORE AFTER ROW [--figures]: did an operator get faster, and nothing else worse? BEFORE and AFTER hold a bench.json each (or are
# one), ROW is "NAME, SHAPE" as compare_bench.sh prints it, or a step's name. With a GPU it also runs the kernels' tests,
# unless --figures says not to.
set -uo pipefail
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
[ $# = 3 ] || [ "${4:-}" = --figures ] || { sed -n '2,4s/^# //p' "$0"; echo FAIL; exit 1; }
before=$1 after=$2 row=$3 status=0
[ -d "$before" ] && before=$before/bench.json
[ -d "$after" ] && after=$after/bench.json
figures=$("$tree/benchmarks/compare_bench.sh" "$before" "$after" 2>&1)
case $? in
  0) ;;
  1) status=1 ;;
  *) printf '%s\nFAIL\n' "$figures"; exit 1 ;;
esac
printf '%s\n' "$figures"
ROW=$row awk '
  BEGIN { limit = 0.95 }
  index($0, ENVIRON["ROW"] ", s a step ") == 1 { limit = 0.97; ratio = $NF; known = 1 }
  index($0, ENVIRON["ROW"] ", ms ") == 1 { ratio = $NF; known = 1 }
  /^more memory:/ { memory = 1 }
  END {
    gsub(/[()]/, "", ratio)
    if (!known) print "there is no row \"" ENVIRON["ROW"] "\" in both"
    else if (ratio !~ /^[0-9.]+$/) print ENVIRON["ROW"] " was not measured in both"
    else if (ratio >= limit) printf "%s takes %s of its time before: not below %s\n", ENVIRON["ROW"], ratio, limit
    else ok = 1
    if (memory) print "it uses more memory"
    exit !(ok && !memory)
  }' <<<"$figures" || status=1
if [ "${4:-}" = --figures ]; then
  echo "note: the kernels' tests were not run"
elif [ -e /dev/nvidiactl ] && [ -x "$tree/build/test_gpu" ]; then
  "$tree/benchmarks/gpu.sh" tests || status=1
else
  echo "note: no GPU here; CUDA kernels were not run"
fi
if [ $status = 0 ]; then echo PASS; else echo FAIL; fi
exit $status
