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
}
check demo 1 ''
check qwen3_30b_a3b_8layers 1 ''
check deepseek_v2_lite 8 '15\.7G total'
check deepseek_v2_lite_8layers 1 ''
check gpt_oss_20b 8 '20\.9G total'
check gpt_oss_20b_6layers 1 '.*8\.34G FLOP'
check gpt_oss_120b 32 '117G total'
check qwen3_5_35b_a3b 8 '34\.7G total, 3\.4[0-9]G active'
check qwen3_5_35b_a3b_8layers 2 '7\.75G total'
# The larger ones, from the numbers of their configurations.
sized() {  # sized NAME PARAMETERS KEY=VALUE...
  sed -E "$(for pair in "${@:3}"; do printf 's/("%s": )[^,]*/\\1%s/;' "${pair%=*}" "${pair#*=}"; done)
    /layer_types/,/\]/d" "$PITH_SOURCE_DIR/examples/qwen3_5_35b_a3b/config.json" >"$1.json"
  env -C "$PITH_SOURCE_DIR" "$PITHTRAIN" pretrain examples/qwen3_5_35b_a3b.toml --dry-run --processes 64 --set data.train="$PWD/corpus" \
    --set run.folder="$PWD/$1" --set run.device=cpu --set model.config="$PWD/$1.json" --set parallel.ep=64 >"$1.out" 2>&1 || { cat "$1.out"; fail "$1"; }
  grep -q "^# parameters *$2" "$1.out" || { cat "$1.out"; fail "$1 does not have $2"; }
}
sized qwen3_5_122b_a10b '122G total, [0-9.]*G active' hidden_size=3072 num_hidden_layers=48 num_attention_heads=32 \
  linear_num_value_heads=64 moe_intermediate_size=1024 shared_expert_intermediate_size=1024
sized qwen3_5_397b_a17b '39[67]G total, [0-9.]*G active' hidden_size=4096 num_hidden_layers=60 num_attention_heads=32 \
  linear_num_value_heads=64 moe_intermediate_size=1024 shared_expert_intermediate_size=1024 num_experts=512 num_experts_per_tok=10
[ "$(ls *.log | wc -l)" -eq "$(ls "$PITH_SOURCE_DIR"/examples/*.toml | wc -l)" ] || fail "an example is not checked"
echo PASS
