#!/usr/bin/env python3
"""Write the golden files of the DeepSeek-V2 family: tiny random models run by transformers.

    python tests/golden/make_deepseek_v2.py [--out tests/golden] [CASE ...]

The same files, in the same way, as make_qwen3_moe.py, whose functions this one uses.
"""

import json
import math
import pathlib
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as hf

import make_qwen3_moe as common

# `rope` in the style of rope_scaling; `released`: config.json in the style of the released models
# (rope_theta, rope_scaling, torch_dtype) instead of that of transformers 5.
YARN = dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
            original_max_position_embeddings=64)
CASES = {
    # as V2-Lite: no query latent, greedy, first layer dense, YaRN; keys wider than values, odd
    "deepseek_v2_a": dict(
        seed=1, rows=[[9, 1, 14], [5, 17], [1, 1, 6, 3]], aux=True, released=True, rope=YARN,
        config=dict(
            vocab_size=131, hidden_size=24, intermediate_size=40, moe_intermediate_size=12,
            num_hidden_layers=3, first_k_dense_replace=1, num_attention_heads=4, q_lora_rank=None,
            kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=7,
            n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=2,
            topk_method="greedy", tie_word_embeddings=False, rms_norm_eps=1e-6)),
    # as V2: query latent, groups, scaled weights; the two mscales differ; all widths equal to hidden;
    # values wider than keys; every layer sparse; tied; epsilon of the latents' norms differs
    "deepseek_v2_b": dict(
        seed=2, rows=[[19, 8], [2, 1, 11]], aux=True,
        rope=dict(YARN, factor=8, mscale=1.0, mscale_all_dim=0.5,
                  original_max_position_embeddings=16),
        config=dict(
            vocab_size=97, hidden_size=24, intermediate_size=24, moe_intermediate_size=24,
            num_hidden_layers=2, first_k_dense_replace=0, num_attention_heads=3, q_lora_rank=24,
            kv_lora_rank=24, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=12,
            n_routed_experts=12, num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2,
            topk_method="group_limited_greedy", routed_scaling_factor=2.5,
            tie_word_embeddings=True, rms_norm_eps=1e-3)),
    # two of four layers dense, plain rotary frequencies, query latent narrower than a head's share;
    # a document of 70 tokens; labels of its own, experts without tokens
    "deepseek_v2_c": dict(
        seed=3, rows=[[70, 3], [4, 9]], aux=False, answers=[[30, 2], [0, 5]], rope=None,
        config=dict(
            vocab_size=61, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
            num_hidden_layers=4, first_k_dense_replace=2, num_attention_heads=2, q_lora_rank=6,
            kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
            n_routed_experts=40, num_experts_per_tok=1, n_shared_experts=1,
            topk_method="greedy", routed_scaling_factor=1.5, tie_word_embeddings=False,
            rms_norm_eps=1e-5)),
}


def make_model(case):
    rope = dict(case["rope"] or {"type": "default"})
    rope = {"rope_type": rope.pop("type"), "rope_theta": 1e4, **rope}
    config = DeepseekV2Config(
        **case["config"], rope_parameters=rope, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=case["config"]["vocab_size"] - 1)
    model = DeepseekV2ForCausalLM(config)
    random = np.random.RandomState(case["seed"])
    for name, weight in model.named_parameters():
        value = random.standard_normal(tuple(weight.shape))
        if "norm" in name:
            value = 1 + 0.25 * value  # so that a norm weight that is not applied shows
        elif "mlp.gate.weight" in name:
            value = 0.3 * value
        elif "embed" in name or "lm_head" in name:
            value = 0.4 * value
        else:
            value = value / weight.shape[-1] ** 0.5
        weight.data = torch.from_numpy(value.astype(np.float32))
    return model


class Float64Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        rope, dim = config.rope_parameters, config.qk_rope_head_dim
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        self.inv_freq, self.magnitude = rope["rope_theta"] ** -steps, 1.0
        if rope["rope_type"] == "yarn":
            factor = rope["factor"]

            def place(turns):
                return (dim * math.log(rope["original_max_position_embeddings"]
                                       / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"])))

            low = max(math.floor(place(rope["beta_fast"])), 0)
            high = min(math.ceil(place(rope["beta_slow"])), dim - 1)
            ramp = torch.arange(dim // 2, dtype=torch.float64).sub(low)
            ramp = (ramp / (high - low if high > low else 0.001)).clamp(0, 1)
            self.inv_freq = self.inv_freq * (1 - ramp) + self.inv_freq / factor * ramp
            self.magnitude = (hf.yarn_get_mscale(factor, rope["mscale"])
                              / hf.yarn_get_mscale(factor, rope["mscale_all_dim"]))

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq
        return torch.polar(torch.full_like(angles, self.magnitude), angles)


def precise_rotary(q, k, freqs):
    def turn(x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs.unsqueeze(1)).flatten(3)
    return turn(q), turn(k)


def forced_router(self, hidden):
    """transformers' router with the experts given by `self.forced`, an iterator over (T, K) ids."""
    kind = torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(hidden.view(-1, self.hidden_dim).to(kind), self.weight.to(kind))
    idx = next(self.forced)
    return logits, logits.softmax(-1).gather(-1, idx) * self.routed_scaling_factor, idx


def choosable(probabilities, config):
    if config.topk_method == "greedy":
        return probabilities, 1.0
    groups = probabilities.unflatten(-1, (config.n_group, -1))
    best = groups.amax(-1).sort(descending=True)
    border = (best.values[:, config.topk_group - 1] - best.values[:, config.topk_group]).min()
    kept = torch.zeros_like(best.values).scatter(1, best.indices[:, :config.topk_group], 1)
    return (groups * kept[..., None]).flatten(1), border.item()


def released_config(folder):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    fields.update(torch_dtype=fields.pop("dtype"), moe_layer_freq=1, scoring_func="softmax",
                  n_group=1, topk_group=1, num_key_value_heads=fields["num_attention_heads"])
    path.write_text(json.dumps(dict(sorted(fields.items())), indent=2) + "\n")
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters["mscale_all_dim"] == rope["mscale_all_dim"]


FAMILY = SimpleNamespace(
    model=DeepseekV2ForCausalLM, make_model=make_model, rotary=Float64Rotary,
    attention="sdpa", loaded=lambda model: None,
    precise=[(hf.DeepseekV2RMSNorm, "forward", common.precise_norm),
             (hf, "apply_rotary_emb", precise_rotary)],
    forced=[(hf.DeepseekV2TopkRouter, "forward", forced_router)],
    choosable=choosable, released=released_config)

if __name__ == "__main__":
    common.main(__doc__, CASES, FAMILY)
