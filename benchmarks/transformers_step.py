#!/usr/bin/env python3
"""Time one training step of transformers' Qwen3MoeForCausalLM on the CPU, FP32.

    python benchmarks/transformers_step.py                        the demo model, 8 x 512 tokens
    python benchmarks/transformers_step.py FOLDER_OR_CONFIG_JSON [--batch 8] [--sequence 512]
    python benchmarks/transformers_step.py --hidden-size 512 --num-experts 16 ...

A step is forward, backward and AdamW (PyTorch's fused one) on random tokens; weights are random.
The ways transformers runs the experts (eager, grouped_mm) are tried with a few steps; the fastest
is then timed. The third, batched_mm, copies an expert's weights for every token that it gets, 6 GB
a layer for the demo model, so it runs only if --experts asks for it. Prints one JSON object with
the median and the tokens per second. Needs torch and transformers (versions: see
tests/golden/README.md). `pithtrain pretrain` on the same configuration with the same number of
threads is compared with it, on a quiet machine: there cpu_seconds (mean of a step, all threads) is
about threads x median_seconds.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import transformers
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

DEMO = dict(vocab_size=257, hidden_size=256, num_hidden_layers=4, num_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=256, intermediate_size=256,
            num_attention_heads=8, num_key_value_heads=4, head_dim=32)
EXPERTS = ["eager", "grouped_mm"]


def make_config(args):
    if args.model:
        return AutoConfig.from_pretrained(args.model)
    fields = {name: getattr(args, name) for name in DEMO}
    return Qwen3MoeConfig(**fields, norm_topk_prob=True,
                          rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
                          tie_word_embeddings=args.tied, max_position_embeddings=args.sequence)


class Step:
    def __init__(self, config, experts, args):
        torch.manual_seed(1)
        self.model = Qwen3MoeForCausalLM._from_config(
            config, dtype=torch.float32, experts_implementation=experts,
            attn_implementation=args.attention)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(0, config.vocab_size, (args.batch, args.sequence))

    def seconds(self):
        start = time.perf_counter()
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=pathlib.Path, help="model folder or config.json")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, not timed")
    parser.add_argument("--experts", choices=EXPERTS + ["batched_mm"],
                        help="only this implementation")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--tied", action="store_true", help="tie the embeddings")
    parser.add_argument("--rope-theta", type=float, default=1e4)
    for name, value in DEMO.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = make_config(args)

    tried = {}
    for experts in [args.experts] if args.experts else EXPERTS:
        try:
            step = Step(config, experts, args)
            tried[experts] = min(step.seconds() for _ in range(args.warmup + 1))
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"{experts}: {str(error).splitlines()[0]}", file=sys.stderr)
        step = None
    if not tried:
        sys.exit("no implementation of the experts runs here")
    fastest = min(tried, key=tried.get)
    step = Step(config, fastest, args)
    for _ in range(args.warmup):
        step.seconds()
    cpu = time.process_time()
    times = [step.seconds() for _ in range(args.steps)]
    cpu = (time.process_time() - cpu) / args.steps
    median, tokens = statistics.median(times), args.batch * args.sequence
    print(json.dumps({
        "median_seconds": round(median, 4), "tokens_per_second": round(tokens / median, 1),
        "fastest_seconds": round(min(times), 4), "slowest_seconds": round(max(times), 4),
        "cpu_seconds": round(cpu, 4), "load_average": os.getloadavg()[0],
        "batch": args.batch, "sequence": args.sequence, "threads": args.threads,
        "experts": fastest, "attention": args.attention,
        "experts_tried_seconds": {name: round(t, 4) for name, t in tried.items()},
        "parameters": sum(weight.numel() for weight in step.model.parameters()),
        "torch": torch.__version__, "transformers": transformers.__version__}, indent=1))


if __name__ == "__main__":
    main()
