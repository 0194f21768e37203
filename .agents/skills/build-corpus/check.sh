#!/usr/bin/env bash
# check.sh TEXT... --out PREFIX [options of `corpus build`]: builds a corpus, then proves that it is sound.
set -uo pipefail
program=${PITHTRAIN:-$(dirname "${BASH_SOURCE[0]}")/../../../${PITH_BUILD_DIR:-build}/pithtrain}
outs=() previous=
for word in "$@"; do
  case $previous in --out | --validation-out) outs+=("$word") ;; esac
  previous=$word
done
[ ${#outs[@]} -gt 0 ] || { echo "usage: check.sh TEXT... --out PREFIX [options of corpus build]"; echo FAIL; exit 1; }
status=0
"$program" corpus build "$@" || status=1
for out in "${outs[@]}"; do
  [ $status = 0 ] || break
  "$program" corpus verify "$out" || { echo "damaged: $out"; status=1; }
  text=$("$program" corpus show "$out" 0 | tr -d '\0' | head -c 200)
  [ -n "$text" ] || { echo "document 0 of $out decodes to nothing"; status=1; }
  printf '%s, document 0: %s\n' "$out" "$(head -n 1 <<<"$text")"
done
if [ $status = 0 ]; then echo PASS; else echo FAIL; fi
exit $status
