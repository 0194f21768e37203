"""Compares ids, offsets and decoded text with Hugging Face `tokenizers`, text by text.

    ./pith build oracle_driver; pip install tokenizers==0.22.2 numpy   (or all of it: ./pith test --oracle)
    python tests/oracle/tokenizers/compare.py --driver build/oracle_driver \\
        [--suite points|random|files] [--files DIR ...] [--number N] tokenizer.json ...

Prints one line a tokenizer and suite and exits with 1 when anything differs. Ill-formed UTF-8 is
given to the driver as bytes and to Python as bytes.decode(errors="replace").
"""

import argparse
import gzip
import os
import random
import struct
import subprocess
import sys
import tempfile

import numpy
from tokenizers import Tokenizer

POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CONTEXTS = ["a{}b ", " {}{} ", "'{}1", "\n{} \u0301", "e{}\u0327\u0301", "\u4e2d{}\u3042 ", "{}'s"]


def point_texts():
    """Every code point alone, then in seven contexts, 40 code points a text."""
    yield from (chr(c).encode() for c in POINTS)
    for context in CONTEXTS:
        for i in range(0, len(POINTS), 40):
            yield "".join(context.format(*[chr(c)] * 2) for c in POINTS[i : i + 40]).encode()


def random_texts(number, specials, seed=1):
    """Mixed scripts, marks, emoji sequences, controls, runs, special tokens, ill-formed UTF-8."""
    rng = random.Random(seed)
    blocks = [(0x20, 0x7E)] * 6 + [
        (0, 0x1F),
        (0x80, 0x24F),
        (0x300, 0x36F),
        (0x370, 0x52F),
        (0x590, 0x6FF),
        (0x900, 0xDFF),
        (0xE00, 0xFFF),
        (0x1100, 0x11FF),
        (0x1E00, 0x1FFF),
        (0x2000, 0x206F),
        (0x20D0, 0x20FF),
        (0x2100, 0x2BFF),
        (0x3000, 0x30FF),
        (0x4E00, 0x9FFF),
        (0xA000, 0xABFF),
        (0xAC00, 0xD7A3),
        (0xE000, 0xFFFD),
        (0x10000, 0x1FFFF),
        (0x20000, 0x32FFF),
        (0x1F300, 0x1FAFF),
        (0xE0000, 0xE01EF),
        (0, 0x10FFFF),
    ]
    pieces = [
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u200d",
        "\ufe0f",
        "\u00a0",
        "\u3000",
        "\u0085",
        "'s",
        "'LL",
        "don't",
        "I'\u017f",
        "the",
        " of",
        "12345",
        "3.14",
        "https://x.y/?q=1",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f1e9\U0001f1ea",
        "e\u0301",
        "\u0344",
        "\u0f73",
        "\u1100\u1161\u11a8",
        "\u212b",
        "\ufb01",
        "\u01c4",
        "\u0130",
        "<",
        "|>",
        "\u2581",
        "\u0120",
        "###",
        "naive",
        "Stra\u00dfe",
        "\u6f22\u5b57",
        "\u0915\u094d\u0937",
        "\u06a9\u0627",
        "\u0e01\u0e33",
        "<0x41>",
        "\ufffd",
    ] + specials * 2
    broken = [
        b"\xff",
        b"\xc3",
        b"\xe2\x82",
        b"\xf0\x9f\x98",
        b"\xed\xa0\x80",
        b"\xc0\xaf",
        b"\xf5",
        b"\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\xe0\x80\xaf",
    ]
    for _ in range(number):
        out = []
        for _ in range(rng.randint(0, 12)):
            kind = rng.random()
            if kind < 0.45:
                low, high = rng.choice(blocks)
                out.append(
                    "".join(
                        chr(c)
                        for c in (rng.randint(low, high) for _ in range(rng.randint(1, 8)))
                        if not 0xD800 <= c < 0xE000
                    ).encode()
                )
            elif kind < 0.85:
                out.append(rng.choice(pieces).encode())
            elif kind < 0.95:
                out.append(rng.choice(pieces).encode() * rng.randint(2, 30))
            else:
                out.append(rng.choice(broken))
        yield b"".join(out)


def file_texts(folders, limit):
    """Files below the folders, at most `limit` bytes a folder, spread over its files."""
    for folder in folders:
        names = sorted(os.path.join(d, n) for d, _, ns in os.walk(folder) for n in ns)
        random.Random(2).shuffle(names)
        left = limit
        for name in names:
            if os.path.islink(name) or left <= 0:
                continue
            data = gzip.open(name).read() if name.endswith(".gz") else open(name, "rb").read()
            yield data[:100000]
            left -= len(data[:100000])


def run_driver(driver, tokenizer, texts):
    with tempfile.TemporaryFile() as frames:
        for text in texts:
            frames.write(struct.pack("<I", len(text)) + text)
        frames.seek(0)
        done = subprocess.run([driver, tokenizer], stdin=frames, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"driver failed on {tokenizer}")
    data, at, results = done.stdout, 0, []
    for _ in texts:
        (n,) = struct.unpack_from("<I", data, at)
        ids = numpy.frombuffer(data, "<i4", n, at + 4)
        offsets = numpy.frombuffer(data, "<u4", 2 * n, at + 4 + 4 * n)
        at += 4 + 12 * n
        (size,) = struct.unpack_from("<I", data, at)
        results.append((ids.tolist(), offsets, data[at + 4 : at + 4 + size]))
        at += 4 + size
    return results


def compare(driver, path, name, texts, shown=5):
    texts = list(texts)
    oracle = Tokenizer.from_file(path)
    wrong = tokens = 0
    for i in range(0, len(texts), 20000):
        part = texts[i : i + 20000]
        mine = run_driver(driver, path, part)
        unicode_texts = [t.decode(errors="replace") for t in part]
        theirs = oracle.encode_batch(unicode_texts)
        decoded = oracle.decode_batch([e.ids for e in theirs])
        for raw, text, (ids, offsets, back), encoding, text_back in zip(
            part, unicode_texts, mine, theirs, decoded
        ):
            tokens += len(ids)
            data = numpy.frombuffer(text.encode(), "u1")
            starts = numpy.concatenate([[0], numpy.cumsum((data & 0xC0) != 0x80)])
            if len(offsets):  # characters that start before a byte border
                offsets = numpy.where(offsets < len(data), starts[offsets], starts[-1])
            same = (
                ids == encoding.ids
                and back == text_back.encode()
                and offsets.reshape(-1, 2).tolist() == [list(o) for o in encoding.offsets]
            )
            if not same:
                wrong += 1
                if wrong <= shown:
                    print("  DIFFERS", ascii(text)[:300])
                    print(
                        "    mine  ",
                        ids[:40],
                        offsets.reshape(-1, 2).tolist()[:40],
                        ascii(back)[:200],
                    )
                    print(
                        "    theirs",
                        encoding.ids[:40],
                        encoding.offsets[:40],
                        ascii(text_back.encode())[:200],
                    )
    print(f"{path}: {name}: {len(texts)} texts, {tokens} tokens, {wrong} differ", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", required=True)
    parser.add_argument("--suite", action="append", choices=["points", "random", "files"])
    parser.add_argument("--files", action="append", default=[])
    parser.add_argument("--limit", type=int, default=1 << 20, help="bytes of each folder")
    parser.add_argument("--number", type=int, default=200000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("tokenizers", nargs="+")
    args = parser.parse_args()
    wrong = 0
    for path in args.tokenizers:
        specials = [
            t.content for t in Tokenizer.from_file(path).get_added_tokens_decoder().values()
        ][:12]
        for suite in args.suite or ["points", "random", "files"]:
            texts = {
                "points": point_texts,
                "random": lambda: random_texts(args.number, specials, args.seed),
                "files": lambda: file_texts(args.files, args.limit),
            }[suite]()
            wrong += compare(args.driver, path, suite, texts)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
