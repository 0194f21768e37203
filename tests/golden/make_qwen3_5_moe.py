#!/usr/bin/env python3
"""Write the golden files of the Qwen3.5-MoE family: tiny random models run by transformers.

    python tests/golden/make_qwen3_5_moe.py [--out tests/golden] [CASE ...]

The same files, in the same way, as make_qwen3_moe.py, whose functions this one uses.
"""

import json
import pathlib
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

import make_qwen3_moe as common

LINEAR, FULL = "linear_attention", "full_attention"
CASES = {
    # the released layout: text_config inside, model.language_model. names, one tensor of all experts;
    # hidden == intermediate == expert width; documents shorter than the convolution; odd vocabulary
    "qwen3_5_moe_a": dict(
        seed=3, rows=[[9, 1, 14], [5, 17, 2], [1, 1, 3, 3]], aux=True, released=True, partial=0.5,
        config=dict(
            vocab_size=131, hidden_size=24, moe_intermediate_size=24,
            shared_expert_intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_experts=5, num_experts_per_tok=2,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
            linear_value_head_dim=6, layer_types=[LINEAR, LINEAR, LINEAR, FULL],
            tie_word_embeddings=False)),
    # layers not in turns, the first with attention; as many key as value heads, keys as wide as
    # values; 2 * expert width == hidden; a convolution of three; tied; heads rotated whole
    "qwen3_5_moe_b": dict(
        seed=64, rows=[[19, 8], [2, 1, 11]], aux=False, partial=1.0,
        config=dict(
            vocab_size=97, hidden_size=24, moe_intermediate_size=12,
            shared_expert_intermediate_size=10, num_hidden_layers=3, num_attention_heads=3,
            num_key_value_heads=1, head_dim=8, num_experts=24, num_experts_per_tok=3,
            linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=8,
            linear_value_head_dim=8, linear_conv_kernel_dim=3, layer_types=[FULL, LINEAR, FULL],
            tie_word_embeddings=True)),
    # documents longer than one chunk of the scan and than two, short ones between; a quarter of a
    # head rotated; three value heads to a key; labels of its own
    "qwen3_5_moe_c": dict(
        seed=116, rows=[[70, 3], [2, 1, 140]], aux=True, answers=[[30, 2], [0, 1, 60]], partial=0.25,
        config=dict(
            vocab_size=61, hidden_size=16, moe_intermediate_size=8,
            shared_expert_intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
            linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=6,
            linear_value_head_dim=8, layer_types=[LINEAR, FULL, LINEAR],
            tie_word_embeddings=False)),
}


def make_model(case):
    head = case["config"]["head_dim"]
    config = Qwen3_5MoeTextConfig(
        **case["config"], max_position_embeddings=4096, rms_norm_eps=1e-3,
        eos_token_id=case["config"]["vocab_size"] - 1,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_interleaved=True,
                             partial_rotary_factor=case["partial"],
                             mrope_section=[int(head * case["partial"]) // 2, 0, 0]))
    model = Qwen3_5MoeForCausalLM(config)
    random = np.random.RandomState(case["seed"])
    for name, weight in model.named_parameters():
        value = random.standard_normal(tuple(weight.shape))
        if "linear_attn.norm" in name:
            value = 1 + 0.25 * value
        elif "norm" in name:
            value = 0.25 * value  # zero-centred
        elif "embed" in name or "lm_head" in name or "dt_bias" in name:
            value = 0.4 * value
        elif "mlp.gate.weight" in name:
            value = 0.3 * value
        elif "out_proj" in name or "o_proj" in name or "down_proj" in name:
            value = 0.25 * value / weight.shape[-1] ** 0.5  # so that BF16 does not drift far
        elif "A_log" in name:
            value = 0.7 * value - 1
        else:
            value = value / weight.shape[-1] ** 0.5
        weight.data = torch.from_numpy(value.astype(np.float32))
    return model


class Float64Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        rope = config.rope_parameters
        dim = int(config.head_dim * rope["partial_rotary_factor"])
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        self.inv_freq = rope["rope_theta"] ** -steps

    def forward(self, x, position_ids):
        angles = position_ids[0, ..., None].double() * self.inv_freq  # of text: the same on all axes
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def precise_norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def precise_gated_norm(self, x, gate):
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * x * F.silu(gate)


def precise_delta_rule(query, key, value, g, beta, **_):
    """Token after token, by the definition."""
    def normal(x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
    query, key = normal(query) * query.shape[-1] ** -0.5, normal(key)
    state, out = torch.zeros(*value.shape[:1], *key.shape[2:], value.shape[-1], dtype=value.dtype), []
    for t in range(value.shape[1]):
        state = state * g[:, t].to(value.dtype).exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        write = (value[:, t] - read) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], write)
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(out, 1), None


def forced_router(self, hidden):
    """transformers' router with the experts given by `self.forced`, an iterator over (T, K) ids."""
    logits = F.linear(hidden, self.weight)
    kind = torch.promote_types(logits.dtype, torch.float32)
    idx = next(self.forced)
    weight = logits.softmax(-1, dtype=kind).gather(-1, idx)
    return logits, (weight / weight.sum(-1, keepdim=True)).to(logits.dtype), idx


def released_folder(folder):
    """The folder as the released ones are: configuration, names, layout of the experts."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    dtype, tied = text.pop("dtype"), text["tie_word_embeddings"]
    del text["architectures"], text["transformers_version"]
    whole = dict(architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe",
                 text_config=text, tie_word_embeddings=tied, torch_dtype=dtype)
    path.write_text(json.dumps(dict(sorted(whole.items())), indent=2) + "\n")
    saved, fused = load_file(folder / "model.safetensors"), {}
    for name in list(saved):
        if ".experts.0.gate_proj" in name:
            start, end = name.split("0.gate_proj.weight")
            parts = [[saved.pop(f"{start}{i}.{part}_proj.weight") for i in range(text["num_experts"])]
                     for part in ("gate", "up", "down")]
            fused[start + "gate_up_proj"] = torch.stack([torch.cat(two) for two in zip(*parts[:2])])
            fused[start + "down_proj"] = torch.stack(parts[2])
    saved = {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name:
             tensor for name, tensor in (saved | fused).items()}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})


def note_layout(model):
    config = json.loads((pathlib.Path(model.config.name_or_path) / "config.json").read_text())
    model.released_names = "text_config" in config


FAMILY = SimpleNamespace(
    model=Qwen3_5MoeForCausalLM, make_model=make_model, rotary=Float64Rotary, attention="eager",
    loaded=note_layout,
    precise=[(hf.Qwen3_5MoeRMSNorm, "forward", precise_norm),
             (hf.Qwen3_5MoeRMSNormGated, "forward", precise_gated_norm),
             (hf, "torch_chunk_gated_delta_rule", precise_delta_rule)],
    forced=[(hf.Qwen3_5MoeTopKRouter, "forward", forced_router)],
    choosable=lambda probabilities, config: (probabilities, 1.0), released=released_folder)

if __name__ == "__main__":
    common.main(__doc__, CASES, FAMILY)
