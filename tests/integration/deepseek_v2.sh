#!/usr/bin/env bash
# The commands for a second family: train, resume, generate with and without cache, trace, on one and two processes.
set -eu
fail() { echo "FAIL: $*"; exit 1; }
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
tiny_text 60
"$PITHTRAIN" corpus build --out corpus text >/dev/null
cat >config.json <<'END'
{"model_type": "deepseek_v2", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 3, "first_k_dense_replace": 1,
 "num_attention_heads": 2, "q_lora_rank": null, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
 "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
 "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.7},
 "max_position_embeddings": 96, "eos_token_id": 256}
END
cat >run.toml <<'END'
[run]
device = "cpu"
threads = 1
[model]
config = "config.json"
dtype = "float32"
[data]
train = "corpus"
sequence_length = 32
[training]
steps = 8
global_batch = 8
micro_batch = 1
lr = 1e-2
warmup_steps = 2
END
train() { "$PITHTRAIN" pretrain run.toml --set run.folder="$1" "${@:2}" >"$1.log" || { cat "$1.log"; fail "$1"; }; }
loss() { grep -oE '"loss":[^,}]*' "$1/metrics.jsonl" | cut -d: -f2; }
train straight
train halves --set checkpoint.interval=4
rm -r halves/checkpoints/step-00000008
train halves
diff <(loss straight) <(loss halves) || fail "resuming changed the losses"
loss straight | awk 'NR == 1 { first = $1 } END { exit !($1 < 0.9 * first) }' || fail "the loss does not fall"
"$PITHTRAIN" launch 2 pretrain run.toml --set run.folder=two --set parallel.ep=2 >two.log 2>&1 || { cat two.log; fail "two processes"; }
paste <(loss straight) <(loss two) | awk '{ d = $1 / $2 - 1; if (d > 1e-4 || d < -1e-4) exit 1 }' || fail "EP 2 computes another loss"

model=straight/checkpoints/step-00000008
generate() { "$PITHTRAIN" generate $model --device cpu --quiet --max-tokens 30 --temperature 0 --prompt 12 --prompt 314 "$@"; }
cmp <(generate) <(generate --no-cache) || fail "the cache changes greedy text"
echo '{"rows": [[[49, 10, 50, 10], [51]], [[52, 53, 10]]]}' >ids.json
"$PITHTRAIN" trace $model --tokens ids.json --out trace.safetensors --grads --routing >trace.log
for name in grad.model.layers.0.mlp.down_proj.weight grad.model.layers.1.mlp.shared_experts.up_proj.weight \
  grad.model.layers.2.self_attn.kv_a_proj_with_mqa.weight routing.topk_idx.1; do
  grep -aq "\"$name\"" trace.safetensors || fail "the trace lacks $name"
done
"$PITHTRAIN" inspect $model >/dev/null
echo PASS
