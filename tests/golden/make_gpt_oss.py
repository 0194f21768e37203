#!/usr/bin/env python3
"""Write the golden files of the GPT-OSS family: tiny random models run by transformers.

    python tests/golden/make_gpt_oss.py [--out tests/golden] [CASE ...]

The same files, in the same way, as make_qwen3_moe.py, whose functions this one uses.
"""

import json
import math
import pathlib
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss as hf

import make_qwen3_moe as common

YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=64)
CASES = {
    # as the released models, with their style of config.json: windows of 4 (documents longer and
    # shorter), YaRN without truncation; 2 * intermediate == hidden; odd vocabulary
    "gpt_oss_a": dict(
        seed=21, rows=[[9, 1, 14], [5, 17], [1, 1, 6, 3]], aux=True, released=True, rope=YARN,
        config=dict(
            vocab_size=131, hidden_size=24, intermediate_size=12, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=5,
            num_experts_per_tok=2, sliding_window=4, swiglu_limit=1.0, tie_word_embeddings=False,
            rms_norm_eps=1e-3)),
    # all widths equal; the layers' types not in turns; YaRN that does not say whether it truncates;
    # an activation of its own; tied; one KV head, more experts a token, some without any
    "gpt_oss_b": dict(
        seed=8, rows=[[19, 8], [2, 1, 11]], aux=True,
        rope={k: v for k, v in YARN.items() if k != "truncate"} | {"factor": 8.0},
        config=dict(
            vocab_size=97, hidden_size=24, intermediate_size=24, num_hidden_layers=4,
            num_attention_heads=3, num_key_value_heads=1, head_dim=8, num_local_experts=24,
            num_experts_per_tok=3, sliding_window=7, swiglu_alpha=1.3, swiglu_limit=1.1,
            layer_types=["full_attention", "sliding_attention", "sliding_attention",
                         "full_attention"],
            tie_word_embeddings=True, rms_norm_eps=1e-3)),
    # plain rotary frequencies; a document of 70 tokens with a window of 16; half of the experts a
    # token; 2 * intermediate == hidden; labels of its own
    "gpt_oss_c": dict(
        seed=8, rows=[[70, 3], [4, 9]], aux=False, answers=[[30, 2], [0, 5]], rope=None,
        config=dict(
            vocab_size=61, hidden_size=16, intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=4,
            num_experts_per_tok=2, sliding_window=16, tie_word_embeddings=False,
            rms_norm_eps=1e-3)),
}


def make_model(case):
    config = GptOssConfig(
        **case["config"], max_position_embeddings=4096, eos_token_id=case["config"]["vocab_size"] - 1,
        pad_token_id=None,
        rope_parameters={"rope_theta": 1e4, **(case["rope"] or {"rope_type": "default"})})
    model = GptOssForCausalLM(config)
    random = np.random.RandomState(case["seed"])
    for name, weight in model.named_parameters():
        value = random.standard_normal(tuple(weight.shape))
        if "norm" in name:
            value = 1 + 0.25 * value  # so that a norm weight that is not applied shows
        elif "embed" in name or "lm_head" in name or "bias" in name:
            value = 0.4 * value
        elif "router" in name:
            value = 0.3 * value
        elif "experts" in name:
            value = value / weight.shape[1] ** 0.5  # (E, in, out)
        elif "sinks" not in name:
            value = value / weight.shape[-1] ** 0.5
        weight.data = torch.from_numpy(value.astype(np.float32))
    return model


def use_activation(model):
    """What the configuration says of the activation; some versions have the numbers built in."""
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.alpha = getattr(model.config, "swiglu_alpha", 1.702)
        experts.limit = getattr(model.config, "swiglu_limit", 7.0)


class Float64Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        rope, dim = config.rope_parameters, config.head_dim
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        self.inv_freq, self.magnitude = rope["rope_theta"] ** -steps, 1.0
        if rope["rope_type"] == "yarn":
            factor = rope["factor"]

            def place(turns):
                return (dim * math.log(rope["original_max_position_embeddings"]
                                       / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"])))

            low, high = place(rope["beta_fast"]), place(rope["beta_slow"])
            if rope.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            ramp = torch.arange(dim // 2, dtype=torch.float64).sub(low)
            ramp = (ramp / (high - low if high > low else 0.001)).clamp(0, 1)
            self.inv_freq = self.inv_freq * (1 - ramp) + self.inv_freq / factor * ramp
            self.magnitude = 0.1 * math.log(factor) + 1

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


def forced_router(self, hidden):
    """transformers' router with the experts given by `self.forced`, an iterator over (T, K) ids."""
    logits = F.linear(hidden, self.weight, self.bias)
    idx = next(self.forced)
    return logits, logits.gather(-1, idx).softmax(-1), idx


def released_config(folder):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields.update(rope_scaling=rope, torch_dtype=fields.pop("dtype"),
                  experts_per_token=fields["num_experts_per_tok"])
    path.write_text(json.dumps(dict(sorted(fields.items())), indent=2) + "\n")
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters["truncate"] is False


FAMILY = SimpleNamespace(
    model=GptOssForCausalLM, make_model=make_model, rotary=Float64Rotary,
    attention="eager", loaded=use_activation,
    precise=[(hf.GptOssRMSNorm, "forward", common.precise_norm)],
    forced=[(hf.GptOssTopKRouter, "forward", forced_router)],
    choosable=lambda probabilities, config: (probabilities, 1.0), released=released_config)

if __name__ == "__main__":
    common.main(__doc__, CASES, FAMILY)
