#!/usr/bin/env bash
# The commands for DeepSeek-V2: train, resume, generate with and without cache, trace, on one and two processes.
set -eu
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
cat >config.json <<'END'
{"model_type": "deepseek_v2", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 3, "first_k_dense_replace": 1,
 "num_attention_heads": 2, "q_lora_rank": null, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
 "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
 "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.7},
 "max_position_embeddings": 96, "eos_token_id": 256}
END
check_family grad.model.layers.0.mlp.down_proj.weight grad.model.layers.1.mlp.shared_experts.up_proj.weight \
  grad.model.layers.2.self_attn.kv_a_proj_with_mqa.weight routing.topk_idx.1
echo PASS
