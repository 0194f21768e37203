#!/usr/bin/env bash
# check.sh RUN.toml [PROCESSES] [--set KEY=VALUE ...]: three steps of a run, the last traced; says where its time goes.
set -uo pipefail
program=${PITHTRAIN:-$(dirname "${BASH_SOURCE[0]}")/../../../${PITH_BUILD_DIR:-build}/pithtrain}
[ $# -ge 1 ] || { sed -n '2s/^# //p' "$0"; echo FAIL; exit 1; }
run=$1 launch=() folder=${PROFILE_FOLDER:-runs/profile}
shift
[[ ${1:-} =~ ^[0-9]+$ ]] && { [ "$1" -gt 1 ] && launch=(launch "$1"); shift; }
rm -f "$folder"/{trace,profile}-rank*
"$program" ${launch[@]+"${launch[@]}"} pretrain "$run" --set training.steps=3 --set training.warmup_steps=0 --set training.schedule=constant \
  --set training.decay_steps=0 --set validation.interval=0 --set checkpoint.save=false --set checkpoint.resume=false \
  --set profile.steps=[3,3] "$@" --set run.folder="$folder" || { echo FAIL; exit 1; }
status=0
for file in "$folder/trace-rank0.json" "$folder/profile-rank0.txt"; do
  [ -s "$file" ] || { echo "missing: $file"; status=1; }
done
if [ $status = 0 ]; then
  grep -q traceEvents "$folder/trace-rank0.json" || { echo "$folder/trace-rank0.json is no trace"; status=1; }
  head -n 15 "$folder/profile-rank0.txt"
  ls -s "$folder"/trace-rank*.json
fi
if [ $status = 0 ]; then echo PASS; else echo FAIL; fi
exit $status
