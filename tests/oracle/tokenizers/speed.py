"""Measures encoding and training against Hugging Face `tokenizers` on the same texts.

    python tests/oracle/tokenizers/speed.py --driver build/oracle_driver --files DIR ... \\
        tokenizer.json ...

Each of both is given the same list of documents and 1, then 2 threads; the best of three runs
counts.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time

from compare import file_texts

THEIRS = """
import json, sys, time
from tokenizers import Tokenizer
texts = json.load(open(sys.argv[2]))
start = time.time()
tokenizer = Tokenizer.from_file(sys.argv[1])
loaded = time.time() - start
seconds = []
for encode in [tokenizer.encode_batch, tokenizer.encode_batch_fast] * 3:
    start = time.time()
    encode(texts)
    seconds.append(time.time() - start)
print(min(seconds[0::2]), min(seconds[1::2]), loaded)
"""


def frames_of(texts):
    frames = tempfile.NamedTemporaryFile()
    for text in texts:
        frames.write(struct.pack("<I", len(text)) + text)
    frames.flush()
    return frames


def time_mine(driver, path, frames, threads):
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [driver, path, "--time", str(threads)],
            stdin=open(frames.name, "rb"),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        runs.append([float(x) for x in done.stdout.split()])
    return min(r[0] for r in runs), min(r[2] for r in runs)


def time_theirs(path, texts, threads):
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump([t.decode(errors="replace") for t in texts], file)
        file.flush()
        env = dict(os.environ, RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true")
        done = subprocess.run(
            [sys.executable, "-c", THEIRS, path, file.name],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return [float(x) for x in done.stdout.split()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", required=True)
    parser.add_argument("--files", action="append", default=[])
    parser.add_argument("--limit", type=int, default=20 << 20, help="bytes of each folder")
    parser.add_argument("--at-least", type=float, default=0)
    parser.add_argument("tokenizers", nargs="+")
    args = parser.parse_args()
    slow = 0
    long_word = [b"abcdefghijklmnopqrstuvwxyz" * (10_000_000 // 26)]
    one_letter = [b"a" * 1_000_000]
    for path in args.tokenizers:
        total = {}
        for folder in args.files:
            texts = list(file_texts([folder], args.limit))
            megabytes = sum(map(len, texts)) / 1e6
            frames = frames_of(texts)
            for threads in (1, 2):
                mine, load = time_mine(args.driver, path, frames, threads)
                theirs, fast, their_load = time_theirs(path, texts, threads)
                sums = total.setdefault(threads, [0.0, 0.0, 0.0])
                total[threads] = [a + b for a, b in zip(sums, (mine, theirs, fast))]
                print(
                    f"{path} {folder} {megabytes:.1f} MB, {threads} threads: "
                    f"mine {megabytes / mine:.1f} MB/s, theirs {megabytes / theirs:.1f} MB/s "
                    f"(without offsets {megabytes / fast:.1f}): {theirs / mine:.1f} times "
                    f"({fast / mine:.1f}); load {load:.2f} s, {their_load:.2f} s",
                    flush=True,
                )
        for threads, (mine, theirs, fast) in total.items():
            slow += theirs < args.at_least * mine
            print(
                f"{path} all, {threads} threads: {theirs / mine:.2f} times as fast as encode_batch, "
                f"{fast / mine:.2f} times as encode_batch_fast",
                flush=True,
            )
        for name, texts in (("10 MB word", long_word), ("1 MB of one letter", one_letter)):
            seconds = []
            for part in (4, 2, 1):
                frames = frames_of([t[: len(t) // part] for t in texts])
                seconds.append(time_mine(args.driver, path, frames, 1)[0])
                print(f"{path} {name} / {part}: {seconds[-1]:.3f} s", flush=True)
            slow += seconds[2] > 8 * seconds[0] + 0.1  # quadratic time would be 16 times
    if slow:
        print(f"{slow} of these are too slow")
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
