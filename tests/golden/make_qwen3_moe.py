#!/usr/bin/env python3
"""Write the golden files of the Qwen3-MoE family: tiny random models run by transformers.

    python tests/golden/make_qwen3_moe.py [--out tests/golden] [CASE ...]

Needs torch, transformers, numpy and safetensors (versions: README.md beside this file). A few
seconds on one core. Two runs on one machine write the same bytes. What each file means: README.md.
"""

import argparse
import contextlib
import copy
import json
import pathlib
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

IGNORED = -100  # label of a token that is not trained
AUX_COEFFICIENT = 0.1
MARGIN = 1e-4  # least distance between two probabilities whose order decides the routing

# The rows are document lengths. `answers` (c): of each document only the tail of that length is
# trained (0: nothing), as in supervised fine-tuning. `released`: config.json in the style of the
# released models (num_experts, rope_theta) instead of that of transformers 5.
CASES = {
    # hidden == intermediate == moe_intermediate; grouped KV heads; one dense layer of three
    "qwen3_moe_a": dict(
        seed=1, rows=[[9, 1, 14], [5, 17], [1, 1, 6, 3]], aux=True,
        config=dict(
            vocab_size=131, hidden_size=24, intermediate_size=24, moe_intermediate_size=24,
            num_hidden_layers=3, mlp_only_layers=[1], num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_experts=5, num_experts_per_tok=2,
            norm_topk_prob=True, tie_word_embeddings=False, rope_theta=1e4)),
    # nothing equal to hidden; full KV heads; tied embeddings; weights not renormalised
    "qwen3_moe_b": dict(
        seed=182, rows=[[19, 8], [2, 1, 11]], aux=False,
        config=dict(
            vocab_size=97, hidden_size=24, intermediate_size=40, moe_intermediate_size=16,
            num_hidden_layers=2, mlp_only_layers=[0], num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=3,
            norm_topk_prob=False, tie_word_embeddings=True, rope_theta=1e4)),
    # three query heads to a KV head; experts without tokens; labels of its own
    "qwen3_moe_c": dict(
        seed=21, rows=[[7], [4, 3], [1, 5]], aux=True, answers=[[3], [0, 2], [0, 4]],
        released=True,
        config=dict(
            vocab_size=61, hidden_size=24, intermediate_size=32, moe_intermediate_size=8,
            num_hidden_layers=3, mlp_only_layers=[], num_attention_heads=6,
            num_key_value_heads=2, head_dim=8, num_experts=12, num_experts_per_tok=2,
            norm_topk_prob=True, tie_word_embeddings=False, rope_theta=1e6)),
    # every second layer sparse; one KV head; one expert a token; a document of 70 tokens
    "qwen3_moe_d": dict(
        seed=320, rows=[[70, 3]], aux=False,
        config=dict(
            vocab_size=67, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
            num_hidden_layers=4, decoder_sparse_step=2, num_attention_heads=3,
            num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=1,
            norm_topk_prob=False, tie_word_embeddings=False, rope_theta=1e6)),
}


def make_model(case):
    """A model whose weights come from NumPy's frozen generator, FP32."""
    fields = dict(case["config"])
    theta = fields.pop("rope_theta")
    config = Qwen3MoeConfig(
        **fields, rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=256, eos_token_id=fields["vocab_size"] - 1)
    model = Qwen3MoeForCausalLM(config)
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


def make_ids(case):
    """The object of ids.json. Labels are targets: label[t] is compared with the logits of t."""
    random, vocab = np.random.RandomState(case["seed"] + 1000), case["config"]["vocab_size"]
    rows = [[random.randint(0, vocab, n).tolist() for n in lengths] for lengths in case["rows"]]
    if "answers" not in case:
        return {"rows": rows}
    labels = [[[IGNORED] * (len(doc) - n) + doc[len(doc) - n:] for doc, n in zip(*pair)]
              for pair in zip(rows, case["answers"])]
    labels = [[doc[1:] + [IGNORED] for doc in row] for row in labels]
    labels[-1][-1][-1] = (rows[-1][-1][0] + 1) % vocab  # not every label is the next token
    return {"rows": rows, "labels": labels}


def read_ids(ids):
    """Rows and labels of what ids.json holds (a bare list of rows is allowed)."""
    rows = ids["rows"] if isinstance(ids, dict) else ids
    default = [[doc[1:] + [IGNORED] for doc in row] for row in rows]
    labels = ids.get("labels", default) if isinstance(ids, dict) else default
    lengths = [[[len(doc) for doc in row] for row in side] for side in (rows, labels)]
    assert lengths[0] == lengths[1], "labels must have the shape of rows"
    return rows, labels


def checkpoint_names(model, name, tensor):
    """(name, tensor) pairs as a saved checkpoint has them: one tensor for each expert, but as they
    are in memory for GPT-OSS and in the released layout of Qwen3.5."""
    if model.config.model_type == "gpt_oss":
        yield name, tensor
    elif getattr(model, "released_names", False):
        yield name.replace("model.", "model.language_model.", 1), tensor
    elif name.endswith("experts.gate_up_proj"):
        for i, expert in enumerate(tensor):
            gate, up = expert.chunk(2)
            yield name.replace("gate_up_proj", f"{i}.gate_proj.weight"), gate
            yield name.replace("gate_up_proj", f"{i}.up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        for i, expert in enumerate(tensor):
            yield name.replace("down_proj", f"{i}.down_proj.weight"), expert
    else:
        yield name, tensor


class Float64Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self.inv_freq = config.rope_parameters["rope_theta"] ** -steps

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def precise_norm(self, x):
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * x


def forced_router(self, hidden):
    """transformers' router with the experts given by `self.forced`, an iterator over (T, K) ids."""
    logits = F.linear(hidden, self.weight)
    kind = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.softmax(-1, dtype=kind)
    idx = next(self.forced)
    weight = probabilities.gather(-1, idx)
    if self.norm_topk_prob:
        weight = weight / weight.sum(-1, keepdim=True)
    return logits, weight.to(logits.dtype), idx


@contextlib.contextmanager
def patched(patches):
    """Replaces functions by name; the router and the norm have no other handle."""
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, function in patches:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in saved:
            setattr(owner, name, function)


def copy_in(model, dtype, family):
    """A copy of the model that computes in `dtype`. Rotary tables stay FP32 (or become FP64)."""
    twin = copy.deepcopy(model).to(dtype)
    twin.model.rotary_emb = (family.rotary(model.config) if dtype == torch.float64
                             else copy.deepcopy(model.model.rotary_emb))
    return twin


def run(model, ids, family=None, dtype=torch.float32, routing=None, aux_coefficient=0.0):
    """Everything that `expected_*.safetensors` holds, and the routers' probabilities by layer.

    Documents are isolated and positions restart in each, so each one goes through the model alone.
    `routing` (layer -> topk_idx) is forced upon the routers if given. FP32 on its own routes needs no
    `family`.
    """
    rows, labels = read_ids(ids)
    documents = [doc for row in rows for doc in row]
    wide = torch.promote_types(dtype, torch.float32)
    model = copy_in(model, dtype, family)
    layers = list(enumerate(model.model.layers))
    sparse = [i for i, layer in layers if hasattr(layer.mlp, "experts")]
    kept = {}  # name -> one tensor a document, in row order

    def keep(name, tensor):
        kept.setdefault(name, []).append(tensor)

    def router_hook(i):
        def hook(module, args, out):
            logits, weight, idx = out
            if not routing:  # highest first
                weight, order = weight.sort(-1, descending=True)
                idx = idx.gather(-1, order)
            keep(f"router.{i}", logits)
            keep(f"routing.topk_weight.{i}", weight.to(wide))
            keep(f"routing.topk_idx.{i}", idx)
        return hook

    for i, layer in layers:
        layer.register_forward_hook(lambda module, args, out, i=i: keep(f"hidden.{i}", out[0]))
    for i in sparse:
        mlp = model.model.layers[i].mlp
        gate = mlp.gate if hasattr(mlp, "gate") else mlp.router
        gate.register_forward_hook(router_hook(i))
        if routing:
            gate.forced = iter(routing[i].split([len(doc) for doc in documents]))
    precise = family.precise if dtype == torch.float64 else []
    with patched(precise + (family.forced if routing else [])):
        for doc in documents:
            keep("logits", model(input_ids=torch.tensor([doc]), use_cache=False).logits[0])
    out = {name: torch.cat(parts) for name, parts in kept.items()}

    label = torch.tensor([x for row in labels for doc in row for x in doc])
    trained = label != IGNORED
    logprobs = out["logits"].to(wide).log_softmax(-1)
    logprobs = logprobs.gather(-1, label.clamp(min=0)[:, None])[:, 0]
    out["logprobs"] = torch.where(trained, logprobs, 0)
    out["loss"] = total = -out["logprobs"].sum() / trained.sum()

    probabilities = {i: out.pop(f"router.{i}").to(wide).softmax(-1) for i in sparse}
    if aux_coefficient:
        lengths = [sum(map(len, row)) for row in rows]
        for i in sparse:
            aux = balance_loss(probabilities[i], out[f"routing.topk_idx.{i}"], lengths)
            out[f"aux.{i}"] = aux
            total = total + aux_coefficient * aux
    total.backward()
    for name, weight in model.named_parameters():
        out |= {f"grad.{saved}": grad for saved, grad in checkpoint_names(model, name, weight.grad)}
    out = {name: value.detach().clone().contiguous() for name, value in out.items()}
    return out, {i: value.detach() for i, value in probabilities.items()}


def balance_loss(probabilities, topk_idx, lengths):
    """Mean over rows of sum_e count_e / (K T) * E * mean_t p_te: 1.0 if the row is balanced."""
    num_experts, losses = probabilities.shape[-1], []
    for p, idx in zip(probabilities.split(lengths), topk_idx.split(lengths)):
        count = torch.bincount(idx.flatten(), minlength=num_experts)
        losses.append((count / idx.numel() * num_experts * p.mean(0)).sum())
    return torch.stack(losses).mean()


def margin(probabilities, top_k):
    """Least distance of two neighbours among the k + 1 highest probabilities, over all tokens."""
    return min((-p.sort(descending=True).values[:, :top_k + 1].diff()).min().item()
               for p in probabilities.values())


def relative_errors(out, reference):
    """Norm of the difference / norm of the reference; None where the reference is exactly zero."""
    errors = {}
    for name, value in reference.items():
        norm = value.double().norm()
        if "topk_idx" not in name:
            error = (out[name].double() - value.double()).norm() / norm
            errors[name] = float(f"{error:.1e}") if norm > 0 else None
    return errors


def group_of(name):
    """The group under which tolerance.json sums up a tensor."""
    if not name.startswith("grad."):
        return ".".join(part for part in name.split(".") if not part.isdigit())
    kinds = {"experts": "experts", "mlp.gate.": "router", "mlp.router.": "router", "norm": "norms", "self_attn": "attention",
             "linear_attn": "delta net", "embed": "embedding", "lm_head": "head"}
    return "grad " + next((group for key, group in kinds.items() if key in name), "dense mlp")


def worst(errors):
    groups = {}
    for name, error in errors.items():
        if error is not None:
            groups[group_of(name)] = max(error, groups.get(group_of(name), 0))
    return groups


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def released_config(folder):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["num_experts"] = fields.pop("num_local_experts")
    fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"]
    fields.update(rope_scaling=None, torch_dtype=fields.pop("dtype"))
    path.write_text(json.dumps(dict(sorted(fields.items())), indent=2) + "\n")
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters["rope_theta"] == fields["rope_theta"]
    assert config.num_experts == fields["num_experts"]


def save_model(model, folder):
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    for name, weight in model.named_parameters():
        for checkpoint_name, value in checkpoint_names(model, name, weight):
            assert torch.equal(saved.pop(checkpoint_name), value), checkpoint_name
    assert not saved, f"not a parameter: {list(saved)}"


# What a family's own script (make_FAMILY.py) replaces. `loaded` changes the model that is read
# back; `precise`: (owner, name, function) that take the place of what rounds to FP32, in the FP64
# run; `choosable`: probabilities with 0 where an expert cannot be chosen, and the least distance
# that decided that.
FAMILY = SimpleNamespace(
    model=Qwen3MoeForCausalLM, make_model=make_model, rotary=Float64Rotary, attention="sdpa",
    loaded=lambda model: None,
    precise=[(hf.Qwen3MoeRMSNorm, "forward", precise_norm)],
    forced=[(hf.Qwen3MoeTopKRouter, "forward", forced_router)],
    choosable=lambda probabilities, config: (probabilities, 1.0), released=released_config)


def make_case(name, case, folder, family=FAMILY):
    folder.mkdir(parents=True, exist_ok=True)
    save_model(family.make_model(case), folder)
    if case.get("released"):
        family.released(folder)
    # The saved folder is the source of truth: the model that runs is the one read back.
    model = family.model.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager",
        attn_implementation=family.attention)
    family.loaded(model)
    ids = make_ids(case)
    (folder / "ids.json").write_text(json.dumps(ids) + "\n")

    top_k = case["config"]["num_experts_per_tok"]
    tolerance = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    for coefficient in (0.0, AUX_COEFFICIENT) if case["aux"] else (0.0,):
        fp32, probabilities = run(model, ids, family, aux_coefficient=coefficient)
        routing = {i: fp32[f"routing.topk_idx.{i}"] for i in probabilities}
        fp64, exact = run(model, ids, family, torch.float64, routing, coefficient)
        bf16, _ = run(model, ids, family, torch.bfloat16, routing, coefficient)
        limited, borders = {}, [1.0]
        for layer, idx in routing.items():
            limited[layer], border = family.choosable(exact[layer], model.config)
            borders.append(border)
            assert torch.equal(limited[layer].topk(top_k).indices, idx), "FP64 routes otherwise"
        least = min(margin(limited, top_k), *borders)
        assert least > MARGIN, f"{name}: top-k margin {least:.1e}, choose another seed"
        tolerance["topk_margin"] = float(f"{least:.1e}")
        if coefficient:  # what the balance loss does not touch stands in the other file
            fp32 = {n: t for n, t in fp32.items() if n.split(".")[0] in ("loss", "aux", "grad")}
        file = "expected_aux_fp32" if coefficient else "expected_fp32"
        save_file(fp32, folder / f"{file}.safetensors", metadata={"format": "pt"})
        bf16_errors = relative_errors(bf16, fp32)
        found = {"fp32": worst(relative_errors(fp32, {n: fp64[n] for n in fp32})),
                 "bf16_worst": worst(bf16_errors), "bf16": bf16_errors}
        tolerance |= {"aux": found} if coefficient else found
    write_json(folder / "tolerance.json", tolerance)
    empty = [n for n, g in fp32.items() if n.startswith("grad.") and not g.any()]
    print(f"{name}: loss {fp32['loss'].item():.6f}, margin {least:.1e},",
          f"{len(fp32)} tensors, gradients exactly zero: {len(empty)}")


def main(description=__doc__, cases=CASES, family=FAMILY):
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(cases), metavar="CASE",
                        help=f"of {', '.join(cases)}; default: all")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.disable_progress_bar()
    for name in args.cases:
        make_case(name, cases[name], args.out / name, family)


if __name__ == "__main__":
    main()
