#!/usr/bin/env bash
# check.sh FAMILY: are all the pieces of a model family there (for example qwen3_moe), and are its examples accepted?
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
family=${1:?usage: check.sh FAMILY (for example qwen3_moe)}
build=${PITH_BUILD_DIR:-build}
program=${PITHTRAIN:-$build/pithtrain}
status=0
missing() { echo "missing: $*"; status=1; }
need() { [ -e "$1" ] || missing "$1 ($2)"; }
need "models/$family.h" "configuration and layer"
need "models/$family.cpp" "parse, parameters, the stages"
need "tests/golden/make_$family.py" "numbers of transformers"
grep -rqE "\"model_type\": \"$family\"" tests/integration tests/tiny_run.sh || missing "a tiny model of its own in tests/integration/"
grep -q "\"${family}_a\"" tests/engine/golden_test.cpp || missing "its golden cases in tests/engine/golden_test.cpp"
grep -q "\"models/$family.h\"" apps/families.h && grep -q "family == \"$family\"" apps/families.h || missing "a line in with_family of apps/families.h"
grep -q "\"models/$family.h\"" engine/pipeline.cpp || missing "its instantiation in engine/pipeline.cpp"
grep -q "^## .*models/$family\." docs/models.md || missing "a section in docs/models.md (\`models/$family.*\` in its heading)"
if [ -e "$build/build.ninja" ]; then
  grep -q "models/$family.cpp" "$build/build.ninja" || missing "models/$family.cpp in $build (./pith build)"
fi
cases=0
for folder in tests/golden/"$family"_?; do
  [ -e "$folder/config.json" ] && [ -e "$folder/model.safetensors" ] && [ -e "$folder/expected_fp32.safetensors" ] && cases=$((cases + 1))
done
[ $cases -ge 3 ] || missing "golden cases tests/golden/${family}_?: $cases instead of at least 3"
examples=0
for run in examples/*.toml; do
  config=$(sed -nE 's/^config = "(.*)"$/\1/p' "$run")
  grep -q "\"model_type\": \"$family\"" "$config" || continue
  examples=$((examples + 1)) accepted=
  for processes in 1 2 8 32 64; do  # as many as its layout needs
    out=$("$program" pretrain "$run" --dry-run --processes $processes --set run.device=cpu 2>&1) && { accepted=$processes; break; }
  done
  [ -n "$accepted" ] && echo "$run, $accepted processes: $(sed -n 's/^# parameters *//p' <<<"$out")" || { echo "$run is refused: $out"; status=1; }
done
[ $examples -gt 0 ] || missing "a run configuration in examples/"
if [ $status = 0 ]; then echo PASS; else echo FAIL; fi
exit $status
