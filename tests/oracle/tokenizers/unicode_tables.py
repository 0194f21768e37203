"""Writes text/unicode_tables.h: where Hugging Face `tokenizers` departs from Unicode 14.

PCRE2 10.42 and utf8proc 2.8 know Unicode 14. The regex engine of `tokenizers` is newer, its
normaliser older, and its punctuation older still. Everything is asked of the oracle itself, one
code point at a time. Needs Python 3.11, whose unicodedata is version 14, and the `tokenizers` wheel.

    python tests/oracle/tokenizers/unicode_tables.py > text/unicode_tables.h
"""

import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

assert unicodedata.unidata_version == "14.0.0", "run this with Python 3.11"
POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
ASCII_SYMBOLS = set(map(ord, "$+<=>^`|~"))


def members(pattern):
    """Code points that match a regex class."""
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    found = set()
    for i in range(0, len(POINTS), 20000):
        for piece, _ in split.pre_tokenize_str("".join(map(chr, POINTS[i : i + 20000]))):
            found.update(map(ord, piece))
    return found


def isolated(pre_tokenizer):
    """Code points that a pre-tokenizer cuts out from between two letters."""
    found = set()
    for i in range(0, len(POINTS), 4000):
        text = "".join("a" + chr(c) + "a" for c in POINTS[i : i + 4000])
        for _, (begin, end) in pre_tokenizer.pre_tokenize_str(text):
            if begin % 3 == 1 and end - begin == 1:
                found.add(POINTS[i + begin // 3])
    return found


def ranges(values):
    """[(first, last, value)] of a dict from code point to value."""
    found = []
    for c in sorted(values):
        if found and found[-1][1] == c - 1 and found[-1][2] == values[c]:
            found[-1][1] = c
        else:
            found.append([c, c, values[c]])
    return found


def show(name, comment, words):
    """A C++ string of the words, in lines of at most 100 columns."""
    print(f"\n// {comment}\ninline constexpr std::string_view {name} =")
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > 94:
            lines.append("")
        lines[-1] += word
    print("\n".join(f'    "{line}"' for line in lines) + ";")


def table(values):
    """Words of a dict from code point to value, ordered by value."""
    for value in sorted(set(values.values())):
        yield f"{value:X}: "
        for first, last, _ in ranges({c: 0 for c in values if values[c] == value}):
            yield f"{first:X}-{last:X} " if last > first else f"{first:X} "


def members_of(codes):
    """Words of code points as members of a regex class."""
    for first, last, _ in ranges({c: 0 for c in codes}):
        yield rf"\\x{{{first:X}}}" + (rf"-\\x{{{last:X}}}" if last > first else "")


def stand_ins():
    old = {c: unicodedata.category(chr(c)) for c in POINTS}
    # Obscure ones: patterns spell out ranges of CJK, kana or Hangul, but not of these.
    avoid = lambda c: 0x2E80 <= c < 0xA000 or 0x20000 <= c < 0x40000
    first = {}
    for c in [*range(0xABFF, 0x7FF, -1), *range(0x10000, 0x20000)]:
        if not avoid(c):
            first.setdefault((old[c], c < 0x10000), c)
    changed = {0x180E: first["Cf", True]}  # PCRE2 alone counts it as a space
    for category in (
        "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Cf"
    ).split():
        for c in members(r"\p{%s}" % category):
            if old[c] != category:
                assert c >= 0x800
                changed[c] = first[category, c < 0x10000]
    return changed, old


def inert_marks():
    """Code points that only Unicode 14 decomposes, composes or reorders."""
    nfd, nfkd = normalizers.NFD(), normalizers.NFKD()
    inert = {}
    for c in POINTS:
        s = chr(c)
        if unicodedata.normalize("NFKD", s) != s and nfkd.normalize_str(s) == s:
            inert[c] = 0
        order = unicodedata.combining(s)
        if order:
            text = "a" + s + "\u0334" if order > 1 else "a\u0345" + s
            if nfd.normalize_str(text) == text:
                inert[c] = 0
        assert unicodedata.normalize("NFKD", s) != s or nfkd.normalize_str(s) == s
    return inert


def main():
    changed, old = stand_ins()
    punctuation = isolated(pre_tokenizers.Punctuation("isolated"))
    known = {c for c in POINTS if old[c][0] == "P"} | ASCII_SYMBOLS
    numeric = isolated(pre_tokenizers.Digits(True))
    category = lambda c: old[changed.get(c, c)]
    assert not {c for c in POINTS if category(c)[0] == "N"} - numeric
    lower = normalizers.Lowercase()
    lowered = {}
    for c in POINTS:
        new = lower.normalize_str(chr(c))
        if new != chr(c).lower():
            lowered[c] = ord(new) - c & 0xFFFFFFFF
    print(
        "// Where Hugging Face tokenizers departs from Unicode 14. Written by\n"
        f"// tests/oracle/tokenizers/unicode_tables.py from tokenizers {tokenizers.__version__}.\n"
        "// A table is a text of hexadecimal numbers: a value, then the code points that have it.\n"
        "#pragma once\n#include <string_view>\n\nnamespace pith {"
    )
    show(
        "kStandIns",
        "Code points whose category differs: one of Unicode 14 with that category and length.",
        table(changed),
    )
    show(
        "kInert",
        "Code points that normalisation leaves alone: they are younger than its tables.",
        table(inert_marks()),
    )
    show(
        "kLowerDelta",
        "Letters with a lower case since Unicode 14: the distance to it, modulo 2^32.",
        table(lowered),
    )
    show(
        "kDigitPattern",
        "Numbers, for text with stand-ins.",
        ["[\\\\p{N}", *members_of(c for c in numeric if category(c)[0] != "N"), "]"],
    )
    show(
        "kPunctuationPattern",
        "Punctuation, for text without stand-ins.",
        [
            "[$+<=>^`|~\\\\p{P}",
            *members_of(punctuation - known),
            "](?<![",
            *members_of(known - punctuation),
            "])",
        ],
    )
    print("\n}  // namespace pith")


if __name__ == "__main__":
    main()
