#!/usr/bin/env bash
# check.sh RUN.toml GPUS GIB [--measured RUN_FOLDER] [--set KEY=VALUE ...]: the layouts that fit; and does the estimate for
# a run that was measured on GPUS GPUs lie within 5 % of its peak?
set -uo pipefail
program=${PITHTRAIN:-$(dirname "${BASH_SOURCE[0]}")/../../../${PITH_BUILD_DIR:-build}/pithtrain}
[ $# -ge 3 ] || { sed -n '2,3s/^# //p' "$0"; echo FAIL; exit 1; }
run=$1 gpus=$2 gib=$3 measured=
shift 3
[ "${1:-}" = --measured ] && { measured=${2:?--measured RUN_FOLDER}; shift 2; }
status=0
"$program" estimate "$run" --gpus "$gpus" --memory "$gib" "$@" || status=1
if [ -n "$measured" ]; then
  peak=$(grep -oE '"memory_peak_gib": ?[0-9.e+-]+' "$measured/metrics.jsonl" | sed 's/.*: *//' | sort -g | tail -n 1)
  plan=$("$program" pretrain "$measured/config.toml" --dry-run --processes "$gpus" --set run.device=cpu 2>&1) || { echo "$plan"; status=1; }
  most=$(sed -nE 's/^# memory +stage 0: ([0-9.]+) GiB.*/\1/p' <<<"$plan")
  echo "estimated ${most:-nothing} GiB, measured ${peak:-nothing} GiB"
  awk -v a="${most:-0}" -v b="${peak:-0}" 'BEGIN { if (b <= 0) exit 1; d = 100 * (a / b - 1); printf "%+.1f %%\n", d; exit d > 5 || d < -5 }' || status=1
fi
if [ $status = 0 ]; then echo PASS; else echo FAIL; fi
exit $status
