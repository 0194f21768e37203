#!/usr/bin/env bash
# Every run configuration of examples/ is accepted by --dry-run, on as many processes as it says, and the released models
# have as many parameters as their papers say.
set -eu
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
tiny_text 60
"$PITHTRAIN" corpus build --out corpus text >/dev/null
check() {  # check NAME PROCESSES PARAMETERS
  env -C "$PITH_SOURCE_DIR" "$PITHTRAIN" pretrain "examples/$1.toml" --dry-run --processes "$2" --set data.train="$PWD/corpus" \
    --set run.folder="$PWD/$1" --set run.device=cpu "${@:4}" >"$1.log" 2>&1 || { cat "$1.log"; fail "$1"; }
  grep -q "^# parameters *$3" "$1.log" || { cat "$1.log"; fail "$1 does not have $3"; }
  sed -nE 's/^# memory +stage [0-9]+: ([0-9.]+) GiB.*/\1/p' "$1.log" | awk '{ n += 1 + 99 * ($1 > 0.94 * 139) } END { exit n < 1 || n > 99 }' ||
    { cat "$1.log"; fail "$1 does not fit H200"; }
}
check demo 1 ''
check qwen3_30b_a3b_8layers 1 ''
check qwen3_30b_a3b 8 '30\.5G total, 3\.[34][0-9]*G active'
check qwen3_235b_a22b 64 '235G total, 22\.[0-9]G active'
check deepseek_v2 64 '236G total, 21\.[0-9]G active'
check deepseek_v2_lite 8 '15\.7G total'
check deepseek_v2_lite_8layers 1 ''
check gpt_oss_20b 8 '20\.9G total'
check gpt_oss_20b_6layers 1 '.*8\.34G FLOP'
check gpt_oss_120b 32 '117G total'
check qwen3_5_35b_a3b 8 '34\.7G total, 3\.4[0-9]G active'
check qwen3_5_35b_a3b_8layers 2 '7\.75G total'
check qwen3_5_122b_a10b 32 '122G total, 9\.[5-9][0-9]*G active'
check qwen3_5_397b_a17b 64 '39[67]G total, 17\.[0-9]G active'
[ "$(ls *.log | wc -l)" -eq "$(ls "$PITH_SOURCE_DIR"/examples/*.toml | wc -l)" ] || fail "an example is not checked"
echo PASS
