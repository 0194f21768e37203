#!/usr/bin/env bash
# check.sh RUN.toml PROCESSES GIB [PER_MACHINE] [--set KEY=VALUE ...]: the quickest layout by the estimate that leaves 15 %
# of the memory free, confirmed by the dry run; PASS or FAIL last.
set -uo pipefail
[ $# -ge 3 ] || { sed -n '2,3s/^# //p' "$0"; exit 1; }
program=${PITHTRAIN:-$(dirname "${BASH_SOURCE[0]}")/../../../${PITH_BUILD_DIR:-build}/pithtrain}
run=$1 processes=$2 gib=$3
shift 3
per_machine=8
[[ "${1:-}" =~ ^[0-9]+$ ]] && { per_machine=$1; shift; }

layouts=$("$program" estimate "$run" "$@" --gpus "$processes" --memory "$gib" --reserve 0.15 --limit 100000 2>&1) ||
  { printf '%s\nFAIL\n' "$layouts"; exit 1; }
read -r pp cp ep _ weights recompute rows < <(awk -v most="$per_machine" '$1 ~ /^[0-9]+$/ && NF == 10 && $3 <= most' <<<"$layouts")
[ -n "${rows:-}" ] || { echo "all layouts that fit have ep above $per_machine"; echo FAIL; exit 1; }
read -r rows _ <<<"$rows"
sets=(parallel.pp="$pp" parallel.cp="$cp" parallel.ep="$ep" parallel.weights="$weights" parallel.recompute="$recompute" training.micro_batch="$rows")
plan=$("$program" pretrain "$run" "$@" "${sets[@]/#/--set=}" --set run.device=cpu --dry-run --processes "$processes" 2>&1) ||
  { printf '%s\nFAIL\n' "$plan"; exit 1; }
most=$(sed -nE 's/^# memory +stage [0-9]+: ([0-9.]+) GiB.*/\1/p' <<<"$plan" | sort -g | tail -n 1)
batches=$(sed -nE 's/^# step .* = ([0-9]+) micro-batches .*/\1/p' <<<"$plan")
printf '# %s GiB of %s on the fullest rank, %s micro-batches a step\n[parallel]\npp = %s\ncp = %s\nep = %s\nweights = "%s"\nrecompute = "%s"\n[training]\nmicro_batch = %s\n' \
  "$most" "$gib" "$batches" "$pp" "$cp" "$ep" "$weights" "$recompute" "$rows"
if [ "$pp" -gt 1 ] && [ "$batches" -lt $((4 * pp)) ]; then
  echo "# few micro-batches for $pp stages: 4 PP = $((4 * pp)) keep the bubble small"
fi
awk "BEGIN { exit !($most <= 0.85 * $gib) }" || { echo "the dry run says $most GiB"; echo FAIL; exit 1; }
echo PASS
