#!/usr/bin/env bash
# check.sh FROM TO [options of `convert`]: converts a model folder, then proves that only what the options say has changed.
set -uo pipefail
program=${PITHTRAIN:-$(dirname "${BASH_SOURCE[0]}")/../../../${PITH_BUILD_DIR:-build}/pithtrain}
[ $# -ge 2 ] || { sed -n '2s/^# //p' "$0"; echo FAIL; exit 1; }
from=$1 to=$2
shift 2
layers=999999999 vocabulary=0 reinit='^$' tolerance=0 previous=
for word in "$@"; do
  case $previous in
    --layers) layers=$word ;;
    --vocabulary) vocabulary=1 ;;
    --reinit) reinit=$word ;;
    --dtype) tolerance=0.004 ;;  # BF16 rounds to 1/256 at most
  esac
  previous=$word
done
"$program" convert "$from" "$to" "$@" || { echo FAIL; exit 1; }
differences=$("$program" compare "$from" "$to" --tolerance $tolerance --limit 100000000)
[ $? -le 1 ] && [[ $differences == max* ]] || { echo FAIL; exit 1; }
# awk reads a backslash of the expression itself: through the environment it arrives as it is.
unexpected=$(REINIT=$reinit awk -v layers="$layers" -v vocabulary=$vocabulary -v tolerance=$tolerance '
  NR == 1 || /^[0-9]+ tensors, / { next }
  $NF ~ ENVIRON["REINIT"] { next }
  /^only in A/ && $NF ~ /_(blocks|scales)$/ { packed = 1; next }
  /^only in A/ && $NF ~ /(^|\.)(visual|mtp)\./ { next }
  /^only in A/ && match($NF, /layers\.[0-9]+/) && substr($NF, RSTART + 7, RLENGTH - 7) + 0 >= layers + 0 { next }
  /^only in B/ && $NF ~ /_proj$/ { unpacked[++n] = $0; next }
  /^\(/ && vocabulary && $NF ~ /(embed_tokens|lm_head)\.weight$/ { next }
  /^[0-9]/ && $2 + 0 <= tolerance { next }
  { print }
  END { if (!packed) for (i = 1; i <= n; ++i) print unpacked[i] }' <<<"$differences")
tail -n 1 <<<"$differences"
if [ -n "$unexpected" ]; then
  echo "differences that the options do not explain:"
  head -n 20 <<<"$unexpected"
  echo FAIL
  exit 1
fi
echo PASS
