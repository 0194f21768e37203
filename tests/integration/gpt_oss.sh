#!/usr/bin/env bash
# The commands for GPT-OSS: train, resume, generate with and without cache, trace, on one and two processes; weights of
# other layouts, and in MXFP4 as they are released.
set -eu
. "$PITH_SOURCE_DIR/tests/tiny_run.sh"
cat >config.json <<'END'
{"model_type": "gpt_oss", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
 "sliding_window": 6, "rope_theta": 10000.0, "max_position_embeddings": 96, "eos_token_id": 256,
 "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "truncate": false}}
END
check_family grad.model.layers.0.self_attn.sinks grad.model.layers.1.mlp.experts.gate_up_proj \
  grad.model.layers.2.mlp.experts.down_proj_bias grad.model.layers.2.mlp.router.bias routing.topk_idx.0

# Tensors of all experts are gathered when two processes save: the same file, whatever the layout.
two=two/checkpoints/step-00000008
save_again $two one 1 1 1 1
save_again one/step-00000008 four 4 2 1 2
save_again four/step-00000008 again 1 1 1 1
diff -r one again || fail "four processes changed the checkpoint"
trace() { "$PITHTRAIN" trace "$1" --tokens ids.json --out "$2" --grads --routing >trace.log || { cat trace.log; fail "trace of $1"; }; }
trace $two two.safetensors
trace one/step-00000008 one.safetensors
cmp two.safetensors one.safetensors || fail "the weights that two processes wrote are not their masters"

# The released layout, made from the format's definition: the same results as from a folder with the numbers themselves.
"${PYTHON:-python3}" - straight/checkpoints/step-00000008 <<'END'
import glob, json, os, random, struct, sys
source, random = sys.argv[1], random.Random(1)
magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
numbers = magnitudes + [-x for x in magnitudes]
plain, packed = {}, {}  # name -> dtype, shape, bytes
for path in glob.glob(source + "/model-*.safetensors"):
    data = open(path, "rb").read()
    length, = struct.unpack("<Q", data[:8])
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__": continue
        begin, end = (8 + length + x for x in entry["data_offsets"])
        value = entry["dtype"], entry["shape"], data[begin:end]
        if not name.endswith(("gate_up_proj", "down_proj")):
            plain[name] = packed[name] = value
            continue
        experts, rows, columns = entry["shape"]
        groups = rows // 32
        scales = [random.randrange(119, 125) for _ in range(experts * columns * groups)]
        blocks = random.randbytes(16 * len(scales))
        def number(e, k, n):
            i = ((e * columns + n) * groups + k // 32) * 32 + k % 32  # blocks and scales: expert, column, row
            code = blocks[i // 2] >> (4 if i % 2 else 0) & 15
            return numbers[code] * 2.0 ** (scales[i // 32] - 127)
        values = [number(e, k, n) for e in range(experts) for k in range(rows) for n in range(columns)]
        plain[name] = "BF16", entry["shape"], b"".join(struct.pack("<f", x)[2:] for x in values)
        packed[name + "_blocks"] = "U8", [experts, columns, groups, 16], blocks
        packed[name + "_scales"] = "U8", [experts, columns, groups], bytes(scales)
def write(folder, tensors, **config):
    os.mkdir(folder)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {name: files[i % 2] for i, name in enumerate(tensors)}
    for file in files:
        header, end = {}, 0
        for name in (name for name in tensors if index[name] == file):
            dtype, shape, data = tensors[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
            end += len(data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(f"{folder}/{file}", "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text + b"".join(tensors[name][2] for name in header))
    json.dump({"metadata": {}, "weight_map": index}, open(folder + "/model.safetensors.index.json", "w"))
    json.dump(json.load(open(source + "/config.json")) | config, open(folder + "/config.json", "w"))
write("plain", plain)
write("packed", packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
END
trace plain plain.safetensors
trace packed packed.safetensors
cmp plain.safetensors packed.safetensors || fail "MXFP4 gives other numbers"
for kind in plain packed; do
  train $kind.run --set model.config=$kind --set model.init=$kind --set training.steps=2
  "$PITHTRAIN" launch 2 pretrain run.toml --set run.folder=$kind.ep --set parallel.ep=2 --set model.config=$kind \
    --set model.init=$kind --set training.steps=2 >$kind.log 2>&1 || { cat $kind.log; fail "$kind on two processes"; }
done
diff <(loss plain.run) <(loss packed.run) || fail "MXFP4 trains otherwise"
diff <(loss plain.ep) <(loss packed.ep) || fail "MXFP4 trains otherwise on two processes"
"$PITHTRAIN" convert packed unpacked >convert.log || { cat convert.log; fail "convert of MXFP4"; }
"$PITHTRAIN" compare plain unpacked >compare.log || { cat compare.log; fail "MXFP4 converted gives other numbers"; }
! grep -q quantization_config unpacked/config.json || fail "a converted folder says that it is packed"
! grep -rq quantization_config packed.run/checkpoints || fail "what is written is not packed"
echo PASS
