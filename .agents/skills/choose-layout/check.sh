#!/usr/bin/env bash
# check.sh RUN.toml PROCESSES GIB [PER_MACHINE] [--set KEY=VALUE ...]: the first layout, from the fastest to the most
# frugal, whose memory fits by the dry run; PASS or FAIL last.
set -uo pipefail
[ $# -ge 3 ] || { sed -n '2,3s/^# //p' "$0"; exit 1; }
program=${PITHTRAIN:-$(dirname "${BASH_SOURCE[0]}")/../../../build/pithtrain}
run=$1 processes=$2 gib=$3
shift 3
per_machine=8
[[ "${1:-}" =~ ^[0-9]+$ ]] && { per_machine=$1; shift; }

smallest=99999 smallest_name="none" tried=0
plan() {  # plan PP EP WEIGHTS RECOMPUTE: 0 when it fits
  local sets=(parallel.pp="$1" parallel.ep="$2" parallel.weights="$3" parallel.recompute="$4") text most batches
  text=$("$program" pretrain "$run" "${extra[@]}" "${sets[@]/#/--set=}" --set run.device=cpu --dry-run --processes "$processes" 2>&1) ||
    { refused=$text; return 1; }  # a layout that does not divide, or too few micro-batches
  tried=$((tried + 1))
  most=$(sed -nE 's/^# memory +stage [0-9]+: ([0-9.]+) GiB.*/\1/p' <<<"$text" | sort -g | tail -n 1)
  batches=$(sed -nE 's/^# step .* = ([0-9]+) micro-batches .*/\1/p' <<<"$text")
  if awk "BEGIN { exit !($most < $smallest) }"; then smallest=$most smallest_name="${sets[*]}"; fi
  awk "BEGIN { exit !($most <= 0.85 * $gib) }" || return 1
  printf '# %s GiB of %s on the fullest rank, %s micro-batches a step\n[parallel]\npp = %s\nep = %s\nweights = "%s"\nrecompute = "%s"\n' \
    "$most" "$gib" "$batches" "$1" "$2" "$3" "$4"
  if [ "$1" -gt 1 ] && [ "$batches" -lt $((4 * $1)) ]; then
    echo "# few micro-batches for $1 stages: 4 PP = $((4 * $1)) keep the bubble small"
  fi
}

extra=("$@") refused=""
for ((pp = 1; pp <= processes; pp *= 2)); do
  for recompute in none layer; do
    for weights in keep reshard; do
      for ((ep = 1; ep <= per_machine && ep * pp <= processes; ep *= 2)); do
        plan $pp $ep $weights $recompute && { echo PASS; exit 0; }
      done
    done
  done
done
[ $tried -eq 0 ] && printf 'no layout is possible; the last refusal:\n%s\n' "$refused"
[ $tried -gt 0 ] && echo "none of $tried layouts fits; the smallest: $smallest GiB with $smallest_name (more processes, parallel.cp, shorter rows)"
echo FAIL
exit 1
