#!/usr/bin/env bash
# The commands for Qwen3.5-MoE, in the released layout: train, resume, generate with and without cache, trace, on one and
# two processes; context parallelism; checkpoints of other layouts; a folder with vision and MTP tensors.
set -eu
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
cat >config.json <<'END'
{"model_type": "qwen3_5_moe", "tie_word_embeddings": false, "vision_config": {"depth": 1},
 "text_config": {"model_type": "qwen3_5_moe_text", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 3,
  "full_attention_interval": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4,
  "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
  "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 96,
  "eos_token_id": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}}
END
layers=model.language_model.layers
check_family grad.$layers.0.linear_attn.A_log grad.$layers.1.linear_attn.in_proj_qkv.weight grad.$layers.1.linear_attn.conv1d.weight \
  grad.$layers.2.self_attn.q_proj.weight grad.$layers.2.mlp.experts.gate_up_proj grad.$layers.0.mlp.shared_expert_gate.weight routing.topk_idx.0

"$PITHTRAIN" launch 2 pretrain run.toml --set run.folder=cp --set parallel.cp=2 >cp.log 2>&1 || { cat cp.log; fail "CP 2"; }
paste <(loss straight) <(loss cp) | awk '{ d = $1 / $2 - 1; if (d > 1e-4 || d < -1e-4) exit 1 }' || fail "CP 2 computes another loss"

# Tensors of all experts are gathered when processes save: the same file, whatever the layout.
two=two/checkpoints/step-00000008
save_again $two one 1 1 1 1
save_again one/step-00000008 four 4 2 1 2
save_again four/step-00000008 again 1 1 1 1
diff -r one again || fail "four processes changed the checkpoint"

# What is not of the text model is named and left out.
cp -r $two whole
rm whole/manifest.json
"${PYTHON:-python3}" - whole <<'END'
import json, struct, sys
folder = sys.argv[1]
names = ["model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"]
header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]} for i, name in enumerate(names)}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
open(folder + "/other.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + bytes(16))
index = json.load(open(folder + "/model.safetensors.index.json"))
index["weight_map"] |= {name: "other.safetensors" for name in names}
json.dump(index, open(folder + "/model.safetensors.index.json", "w"))
END
trace() { "$PITHTRAIN" trace "$1" --tokens ids.json --out "$2" --grads >trace.log 2>&1 || { cat trace.log; fail "trace of $1"; }; }
trace $two text.safetensors
trace whole whole.safetensors
cmp text.safetensors whole.safetensors || fail "vision and MTP tensors change the text model"
grep -q "not part of the text model: mtp.fc.weight" trace.log || fail "ignored tensors are not named"
echo PASS
