#!/usr/bin/env bash
# check.sh RUN_A RUN_B [TOLERANCE]: do the curves of two runs agree over their common steps? Draws both in RUN_A/compare.html.
set -uo pipefail
program=${PITHTRAIN:-$(dirname "${BASH_SOURCE[0]}")/../../../${PITH_BUILD_DIR:-build}/pithtrain}
[ $# -ge 2 ] || { sed -n '2s/^# //p' "$0"; echo FAIL; exit 1; }
status=0
for run in "$1" "$2"; do
  [ -e "$run/metrics.jsonl" ] || { echo "$run is no run folder: it holds no metrics.jsonl"; status=1; }
done
if [ $status = 0 ]; then
  "$program" compare "$1" "$2" --tolerance "${3:-0}" || status=1
  "$program" report "$1" "$2" --out "$1/compare.html" || status=1
fi
if [ $status = 0 ]; then echo PASS; else echo FAIL; fi
exit $status
