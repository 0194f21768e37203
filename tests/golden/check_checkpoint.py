#!/usr/bin/env python3
"""Check a model folder that this program wrote: its files strictly, then its numbers.

    python tests/golden/check_checkpoint.py FOLDER                      files, then transformers
    python tests/golden/check_checkpoint.py FOLDER --files-only         needs no package at all
    python tests/golden/check_checkpoint.py FOLDER --ids ids.json --trace trace.safetensors

Files: every header, dtype, shape, size and offset; index entries against files both ways; required
files. Then the folder is loaded by transformers, without missing or unexpected names; `--ids`
prints the loss it finds (FP32) and `--trace` compares every tensor of an FP32 `pithtrain trace`
of the same ids. Prints PASS or FAIL and exits 0 or 1. Format of ids.json: README.md beside this.
"""

import argparse
import json
import math
import pathlib
import struct
import sys

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
         "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json"]
INDEX = "model.safetensors.index.json"


def unique_keys(pairs):
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"key {max(keys, key=keys.count)!r} occurs twice")
    return dict(pairs)


def parse_json(where, text, problems):
    """The object that `text` holds; empty after a problem."""
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
        if isinstance(value, dict):
            return value
        problems.append(f"{where}: not a JSON object")
    except (ValueError, RecursionError) as error:
        problems.append(f"{where}: {error}")
    return {}


def natural(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_tensor(where, entry, problems):
    """(begin, end) of a well-formed header entry, or None."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return problems.append(f"{where}: wants dtype, shape, data_offsets; has {entry}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        return problems.append(f"{where}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(natural, shape)):
        return problems.append(f"{where}: bad shape {shape}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(natural, offsets)):
        return problems.append(f"{where}: bad offsets {offsets}")
    if offsets[1] - offsets[0] != math.prod(shape) * SIZES[dtype]:
        problems.append(f"{where}: {dtype} {shape} in {offsets[1] - offsets[0]} bytes")
    return tuple(offsets)


def check_safetensors(path, problems):
    """Name -> bytes of the tensors in one file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            problems.append(f"{path.name}: header of {length} bytes in a file of {size}")
            return {}
        raw = file.read(length)
    header = parse_json(f"{path.name}: header", raw, problems)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != "pt":
        problems.append(f'{path.name}: __metadata__ is {metadata}, wants {{"format": "pt"}}')
    elif not all(isinstance(text, str) for text in metadata.values()):
        problems.append(f"{path.name}: __metadata__ holds more than text: {metadata}")
    spans = {name: check_tensor(f"{path.name}: {name}", entry, problems)
             for name, entry in header.items()}
    spans = {name: span for name, span in spans.items() if span}
    position = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            problems.append(f"{path.name}: {name} begins at {begin}, not at {position}")
        position = end
    if position != size - 8 - length:
        problems.append(f"{path.name}: tensors end at {position}, data at {size - 8 - length}")
    return {name: end - begin for name, (begin, end) in spans.items()}


def check_files(folder, tokenizer):
    """All problems of the folder's files; prints what it holds."""
    problems = []
    required = ["config.json", "generation_config.json"] + TOKENIZER_FILES * tokenizer
    for name in required:
        if (folder / name).is_file():
            parse_json(name, (folder / name).read_bytes(), problems)
        else:
            problems.append(f"{name}: missing")
    tensors, home = {}, {}
    files = sorted(folder.glob("model*.safetensors"))
    for path in files:
        for name, size in check_safetensors(path, problems).items():
            if name in home:
                problems.append(f"{name}: in {home[name]} and in {path.name}")
            tensors[name], home[name] = size, path.name
    total = sum(tensors.values())
    if (folder / INDEX).is_file():
        index = parse_json(INDEX, (folder / INDEX).read_bytes(), problems)
        metadata, listed = index.get("metadata"), index.get("weight_map")
        if not isinstance(metadata, dict) or metadata.get("total_size") != total:
            problems.append(f"{INDEX}: metadata {metadata}, tensors have {total} bytes")
        if not isinstance(listed, dict):
            problems.append(f"{INDEX}: no weight_map")
            listed = {}
        for name in sorted(listed.keys() | home.keys()):
            if listed.get(name) != home.get(name):
                problems.append(f"{name}: index says {listed.get(name)}, is in {home.get(name)}")
    elif [path.name for path in files] != ["model.safetensors"]:
        problems.append(f"{INDEX}: missing, and {len(files)} weight files")
    if not tensors:
        problems.append("no tensors")
    print(f"{folder}: {len(files)} weight file(s), {len(tensors)} tensors, {total} bytes")
    return problems


def check_numbers(folder, ids_path, trace_path, tolerance):
    """Problems found by transformers."""
    import torch
    import transformers
    from safetensors.torch import load_file

    import make_qwen3_moe as golden

    problems = []
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            problems.append(f"transformers: {kind}: {info[kind]}")
    count = sum(weight.numel() for weight in model.parameters())
    print(f"transformers {transformers.__version__}: {type(model).__name__}, {count} parameters")
    if not ids_path or problems:
        return problems
    model.released_names = "text_config" in json.loads((folder / "config.json").read_text())
    reference, _ = golden.run(model, json.loads(ids_path.read_text()))
    print(f"loss {reference['loss'].item():.9g}")
    if not trace_path:
        return problems
    trace = load_file(trace_path)
    gradients = any(name.startswith("grad.") for name in trace)
    wanted = ["logits", "loss", "logprobs"]
    wanted += [name for name in reference if gradients and name.startswith("grad.")]
    problems += [f"{trace_path.name}: {name} is missing" for name in wanted if name not in trace]
    worst = {}
    for name, value in trace.items():
        if name not in reference:
            if name.startswith("grad."):
                problems.append(f"{trace_path.name}: {name}: no such parameter")
            continue
        if value.shape != reference[name].shape:
            problems.append(f"{name}: {list(value.shape)}, not {list(reference[name].shape)}")
        elif "topk_idx" in name:
            wrong = (value != reference[name]).any(-1).nonzero().flatten().tolist()
            if wrong:
                problems.append(f"{name}: other experts for tokens {wrong[:8]}")
        else:
            norm = reference[name].double().norm().item()
            error = (value.double() - reference[name].double()).norm().item()
            error = error / norm if norm else error  # an expert without tokens: exactly zero
            group = golden.group_of(name)
            worst[group] = max(error, worst.get(group, 0))
            if not error <= (tolerance if norm else 0):
                problems.append(f"{name}: relative error {error:.1e}")
    for group, error in worst.items():
        print(f"  {group:20} worst relative error {error:.1e}")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, add_help=True,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--files-only", action="store_true", help="do not load the model")
    parser.add_argument("--tokenizer", action="store_true", help="tokenizer files are required too")
    parser.add_argument("--ids", type=pathlib.Path, help="ids.json to compute the loss of")
    parser.add_argument("--trace", type=pathlib.Path, help="what `pithtrain trace` wrote for --ids")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative, default 1e-5")
    args = parser.parse_args()
    if args.trace and not args.ids:
        parser.error("--trace needs --ids")
    problems = check_files(args.folder, args.tokenizer)
    if not problems and not args.files_only:
        problems = check_numbers(args.folder, args.ids, args.trace, args.tolerance)
    for problem in problems:
        print(f"  {problem}")
    print("FAIL" if problems else "PASS")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
