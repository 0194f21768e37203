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
