# What the integration scripts train: sourced by them, in their temporary folder.

# tiny_text COUNT: text/1.txt ... of unequal lengths.
tiny_text() {
  local i
  mkdir text
  for i in $(seq 1 "$1"); do seq "$i" $((i * 37 % 90 + 2 * i)) >"text/$i.txt"; done
}

# tiny_config [layers=2] [experts=4] [width=24] [dense='[]'] [positions=64]: config.json of a Qwen3-MoE over bytes.
tiny_config() {
  local layers=2 experts=4 width=24 dense='[]' positions=64
  local "$@"
  cat >config.json <<END
{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 257, "hidden_size": 32,
 "num_hidden_layers": $layers, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
 "intermediate_size": 48, "moe_intermediate_size": $width, "num_experts": $experts, "num_experts_per_tok": 2,
 "norm_topk_prob": true, "mlp_only_layers": $dense, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
 "max_position_embeddings": $positions, "tie_word_embeddings": false, "eos_token_id": 256}
END
}

fail() { echo "FAIL: $*"; exit 1; }
unset MPIRUN  # launch has to find the one of .deps

share_of() { [ "$1" = 2 ] && echo 0.3 || echo 0; }  # parallel.head_share: two stages share the head
# A checkpoint loaded by a job of several processes and saved without a step, as ROOT/step-....
save_again() {  # save_again FROM ROOT PROCESSES PP CP EP
  PITH_TEST_SAVE_AGAIN="$1 $2 $4 $5 $6 $(share_of "$4")" "$PITHTRAIN" launch "$3" --program "$PITH_BUILD_DIR/test_parallel" again \
    >again.log 2>&1 || { tail again.log; fail "$1 loaded as $3 processes, pp $4 cp $5 ep $6"; }
}

# tiny_toml CORPUS <<END: run.toml of config.json on one thread in FP32; more keys of [data], then other sections, from stdin.
tiny_toml() {
  printf '[run]\ndevice = "cpu"\nthreads = 1\n[model]\nconfig = "config.json"\ndtype = "float32"\n' >run.toml
  printf '[data]\ntrain = "%s"\nsequence_length = 32\n' "$1" >>run.toml
  cat >>run.toml
}

# check_family NAME...: what config.json describes is trained, resumed, generates with and without cache and is traced,
# on one process and two. NAMEs are tensors that the trace has to hold.
check_family() {
  local name model=straight/checkpoints/step-00000008
  tiny_text 60
  "$PITHTRAIN" corpus build --out corpus text >/dev/null
  tiny_toml corpus <<'END'
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

  generate() { "$PITHTRAIN" generate $model --device cpu --max-tokens 30 --temperature 0 --prompt 12 --prompt 314 "$@"; }
  cmp <(generate 2>/dev/null) <(generate --no-cache 2>/dev/null) || fail "the cache changes greedy text"
  echo '{"rows": [[[49, 10, 50, 10], [51]], [[52, 53, 10]]]}' >ids.json
  "$PITHTRAIN" trace $model --tokens ids.json --out trace.safetensors --grads --routing >trace.log
  for name in "$@"; do
    grep -aq "\"$name\"" trace.safetensors || fail "the trace lacks $name"
  done
  "$PITHTRAIN" inspect $model >/dev/null
}
