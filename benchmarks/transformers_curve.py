#!/usr/bin/env python3
"""Train a small model of each family here and in transformers; compare the loss of every step.

    python benchmarks/transformers_curve.py [--program build/pithtrain] [--device cuda] [FAMILY ...]

transformers makes the random weights (4 layers, 16 experts), this project loads them and trains in
BF16 with FP32 masters (on a CPU in FP32); transformers trains in FP32 with torch's AdamW on the rows
that `pithtrain pretrain --rows` prints, at the rates that metrics.jsonl states. No balance loss, no
weight decay. Prints both curves and fails where the mean of |difference| / loss over the steps is
0.5 % or more. Needs torch, transformers and the demo's corpus (`./pith demo`, or `benchmarks/gpu.sh
curve`).
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
import transformers as hf

COMMON = dict(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
              head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False,
              num_experts_per_tok=4)
ROPE = dict(rope_type="default", rope_theta=1e4)
FAMILIES = {
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(
        **COMMON, num_experts=16, moe_intermediate_size=256, intermediate_size=512,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], rope_parameters=ROPE, **IDS)),
    "deepseek_v2": lambda: hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(
        **{k: v for k, v in COMMON.items() if k != "head_dim"} | dict(num_key_value_heads=8),
        n_routed_experts=16, n_shared_experts=2, moe_intermediate_size=256, intermediate_size=1024,
        first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=64,
        qk_rope_head_dim=32, v_head_dim=64, topk_method="greedy", norm_topk_prob=False,
        rope_parameters=ROPE, **IDS)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(
        **COMMON, num_local_experts=16, intermediate_size=256, sliding_window=128,
        rope_parameters=ROPE, **IDS)),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(
        **COMMON, num_experts=16, moe_intermediate_size=256, shared_expert_intermediate_size=256,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=64, layer_types=["linear_attention"] * 3 + ["full_attention"],
        rope_parameters=ROPE | dict(mrope_interleaved=True, partial_rotary_factor=0.25,
                                    mrope_section=[4, 2, 2]), **IDS)),
}
IDS = {}


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}")
    return done.stdout


def compare(family, args):
    torch.manual_seed(7)
    model = FAMILIES[family]().to(torch.float32)
    model.config._attn_implementation = "eager"
    folder = pathlib.Path("runs") / f"transformers-curve-{family}"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder / "start")
    config = folder / "run.toml"
    config.write_text(f"""
[run]
folder = "{folder}/run"
device = "{args.device}"
[model]
config = "{folder}/start/config.json"
init = "{folder}/start"
dtype = "{'bfloat16' if args.device == 'cuda' else 'float32'}"
[data]
train = "{args.corpus}"
sequence_length = {args.sequence}
document_mask = false
[training]
steps = {args.steps}
global_batch = {args.batch}
micro_batch = {args.batch // 2}
lr = 3e-4
warmup_steps = {min(10, args.steps)}
weight_decay = 0.0
balance_loss = 0.0
[checkpoint]
save = false
""")
    run([args.program, "pretrain", str(config)])
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    steps = [line for line in lines if "step" in line]
    rows = run([args.program, "pretrain", str(config), "--rows", "0", str(args.steps * args.batch)])
    rows = json.loads(rows)
    tokens = torch.tensor([row[0] for row in rows["rows"]]).view(args.steps, args.batch, -1)
    labels = torch.tensor([row[0] for row in rows["labels"]]).view(args.steps, args.batch, -1)

    model.to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    losses, start = [], time.time()
    for step, (x, y) in enumerate(zip(tokens.to(args.device), labels.to(args.device))):
        logits = model(input_ids=x, use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = steps[step]["lr"]
        optimizer.step()
        losses.append(loss.item())
    apart = [abs(a["loss"] - b) / b for a, b in zip(steps, losses)]
    mean, shown = sum(apart) / len(apart), sorted({0, 1, 4, 9, 19, 29, 39, len(apart) - 1})
    print(f"-- {family}: transformers {time.time() - start:.1f} s")
    for i in shown:
        if i < len(apart):
            print(f"step {i + 1:3}  here {steps[i]['loss']:.5f}  transformers {losses[i]:.5f}")
    good = len(apart) == args.steps and mean < 5e-3
    print(f"{family}: mean difference {100 * mean:.4f} %, largest {100 * max(apart):.4f} % "
          f"over {len(apart)} steps: {'PASS' if good else 'FAIL'}", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--program", default="build/pithtrain")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--corpus", default="runs/demo/corpus/train")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    args = parser.parse_args()
    side = json.loads(pathlib.Path(args.corpus + ".json").read_text())
    IDS.update(vocab_size=side["vocab_size"], pad_token_id=None, bos_token_id=None, eos_token_id=0)
    torch.backends.cuda.matmul.allow_tf32 = False
    good = [compare(family, args) for family in args.families]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
