#!/usr/bin/env bash
# The commands for GPT-OSS: train, resume, generate with and without cache, trace, on one and two processes.
set -eu
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
cat >config.json <<'END'
{"model_type": "gpt_oss", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
 "sliding_window": 6, "rope_theta": 10000.0, "max_position_embeddings": 96, "eos_token_id": 256,
 "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "truncate": false}}
END
check_family grad.model.layers.0.self_attn.sinks grad.model.layers.1.mlp.experts.gate_up_proj \
  grad.model.layers.2.mlp.experts.down_proj_bias grad.model.layers.2.mlp.router.bias routing.topk_idx.0
# The released form of the weights' names; what expert parallelism wrote is what one process writes.
"$PITHTRAIN" pretrain run.toml --set run.folder=again --set model.init=two/checkpoints/step-00000008 --set training.steps=1 \
  >again.log || { cat again.log; fail "weights written by two processes cannot be read"; }
echo PASS
