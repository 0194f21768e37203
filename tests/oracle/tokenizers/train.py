"""Compares training with Hugging Face's BpeTrainer: vocabulary and merges have to be equal.

python tests/oracle/tokenizers/train.py --driver build/oracle_driver [--files DIR ...]
"""

import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from compare import file_texts

# kDefaultPattern of text/bpe_trainer.h
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def theirs(texts, size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return json.loads(tokenizer.to_str())["model"]


def mine(driver, texts, size, threads):
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as frames:
        for text in texts:
            data = text.encode()
            frames.write(struct.pack("<I", len(data)) + data)
        frames.seek(0)
        done = subprocess.run(
            [driver, folder, "--train", str(size), str(threads)],
            stdin=frames,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        path = os.path.join(folder, "tokenizer.json")
        Tokenizer.from_file(path)  # Python can load it
        return json.load(open(path))["model"], done.stdout.strip()


def cases(folders):
    yield "six tied pairs", ["DCBBABCDCBABCD"], 300
    yield "low lower newest widest", ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + [
        "widest"
    ] * 3, 300
    rng = random.Random(4)
    for i in range(40):  # few letters: many ties, and many pairs that spell the same token
        words = [
            "".join(rng.choice("ab" if i % 2 else "abcde") for _ in range(rng.randint(1, 30)))
            for _ in range(rng.randint(5, 200))
        ]
        yield f"random words {i}", [" ".join(words)], 257 + rng.randint(5, 400)
    for folder in folders:
        yield folder, [t.decode(errors="replace") for t in file_texts([folder], 2 << 20)], 4000


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", required=True)
    parser.add_argument("--files", action="append", default=[])
    args = parser.parse_args()
    wrong = 0
    for name, texts, size in cases(args.files):
        start = time.time()
        want = theirs(texts, size)
        seconds = time.time() - start
        for threads in (1, 3):
            random.Random(threads).shuffle(texts)
            got, report = mine(args.driver, texts, size, threads)
            pairs = lambda model: [
                m.split(" ") if isinstance(m, str) else m for m in model["merges"]
            ]
            if got["vocab"] != want["vocab"] or pairs(got) != pairs(want):
                wrong += 1
                first = next(
                    (i for i, (a, b) in enumerate(zip(pairs(got), pairs(want))) if a != b), None
                )
                print(
                    f"{name}, {threads} threads: DIFFERS at merge {first}; "
                    f"{len(got['merges'])} and {len(want['merges'])} merges"
                )
        print(
            f"{name}: {len(want['merges'])} merges, theirs {seconds:.2f} s, mine {report}",
            flush=True,
        )
    print(f"{wrong} trainings differ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
