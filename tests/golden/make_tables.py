#!/usr/bin/env python3
"""Write small numeric tables that the operators' tests read: rope.json and router.json.

    python tests/golden/make_tables.py [--out tests/golden]

Only the standard library, float64 arithmetic. What each entry means: README.md beside this file.
"""

import argparse
import json
import math
import pathlib


def digits(values, n=10):
    return [digits(v, n) if isinstance(v, list) else float(f"{v:.{n}g}") for v in values]


def rotary_table(theta, head_dim, positions):
    """cos and sin of position * theta^(-2i/head_dim), i < head_dim/2, one row a position."""
    frequency = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    return {"theta": theta, "head_dim": head_dim, "positions": positions,
            "cos": digits([[math.cos(p * f) for f in frequency] for p in positions]),
            "sin": digits([[math.sin(p * f) for f in frequency] for p in positions])}


def rotate(x, position, theta, interleaved):
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = position * theta ** (-2 * i / len(x))
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def pair_layout():
    """The two readings of a head: Qwen3 and GPT-OSS half-split, DeepSeek interleaved."""
    q = [0.5, -1.25, 0.75, 2.0, -0.5, 1.5, -1.0, 0.25]
    k = [1.0, 0.5, -0.75, 1.25, 2.0, -0.25, 0.5, -1.5]
    theta, at_q, at_k = 10000.0, 7, 3
    case = {"theta": theta, "q": q, "k": k, "q_position": at_q, "k_position": at_k}
    for name, interleaved in ("half_split", False), ("interleaved", True):
        left, right = rotate(q, at_q, theta, interleaved), rotate(k, at_k, theta, interleaved)
        case[name] = {"q": digits(left, 15), "k": digits(right, 15),
                      "dot": digits([sum(a * b for a, b in zip(left, right))], 15)[0]}
    return case


def softmax(logits):
    powers = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(powers) for x in powers]


def top_k(probabilities, k):
    """Highest first; of equal ones the lower id first."""
    return sorted(range(len(probabilities)), key=lambda e: (-probabilities[e], e))[:k]


def routed(name, logits, k, norm_topk_prob, scale=1.0):
    probabilities = softmax(logits)
    idx = top_k(probabilities, k)
    weight = [probabilities[e] for e in idx]
    if norm_topk_prob:
        weight = [w / sum(weight) for w in weight]
    return {"name": name, "logits": logits, "top_k": k, "norm_topk_prob": norm_topk_prob,
            "scale": scale, "topk_idx": idx, "topk_weight": digits([scale * w for w in weight])}


def balance(name, rows, k):
    """Mean over rows of sum_e count_e / (k T) * E * mean_t p_te."""
    losses = []
    for row in rows:
        chances = [softmax(logits) for logits in row]
        chosen = [e for p in chances for e in top_k(p, k)]
        losses.append(sum(chosen.count(e) / len(chosen) * len(row[0]) * sum(p) / len(row)
                          for e, p in enumerate(zip(*chances))))
    aux = digits([sum(losses) / len(losses)])[0]
    return {"name": name, "logits": rows, "top_k": k, "aux": aux}


def router_tables():
    logits = [2.0, 1.0, 0.0, -1.0]
    tie = [0.0, 3.0, 1.0, 3.0, 3.0]
    uneven = [[[1.0, 0.5, -0.25], [0.0, 2.0, 1.0], [-1.0, 0.25, 0.75], [3.0, 1.0, -2.0]],
              [[0.5, -0.5, 1.5]]]
    return {
        "weights": [
            routed("renormalised (Qwen3-MoE)", logits, 2, True),
            routed("not renormalised (DeepSeek-V2-Lite)", logits, 2, False),
            routed("renormalised, scaled", logits, 2, True, 2.5),
            routed("not renormalised, scaled", logits, 2, False, 2.5),
            routed("all equal: the lowest ids", [0.0] * 8, 3, True),
            routed("a tie that is cut: the lower id stays", tie, 2, True),
            routed("a tie among the chosen: the lower id first", tie, 4, False),
            routed("large logits do not overflow", [1000.0, 999.0, -1000.0], 2, False),
        ],
        "balance": [
            balance("uniform probabilities, 128 experts, 8 a token", [[[0.0] * 128] * 2], 8),
            balance("collapsed onto expert 0 of two", [[[40.0, -40.0]] * 3], 1),
            balance("collapsed onto expert 1 of two", [[[-40.0, 40.0]] * 3], 1),
            balance("two rows, each collapsed onto another expert",
                    [[[40.0, -40.0]] * 3, [[-40.0, 40.0]] * 3], 1),
            balance("rows of unequal length weigh the same", uneven, 2),
        ],
    }


def write_json(path, value):
    """One entry a line."""
    sections = []
    for key, content in value.items():
        if isinstance(content, list):
            content = "[\n" + ",\n".join("  " + json.dumps(item) for item in content) + "\n ]"
        else:
            content = json.dumps(content)
        sections.append(f" {json.dumps(key)}: {content}")
    path.write_text("{\n" + ",\n".join(sections) + "\n}\n")
    json.loads(path.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    out = parser.parse_args().out
    positions = [0, 255, 256, 257, 4095, 131071]
    tables = [rotary_table(theta, 128, positions) for theta in (1e6, 1e4)]
    write_json(out / "rope.json", {"tables": tables, "pair_layout": pair_layout()})
    write_json(out / "router.json", router_tables())


if __name__ == "__main__":
    main()
