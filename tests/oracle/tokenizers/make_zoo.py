"""Trains small tokenizers that together use every supported component.

python tests/oracle/tokenizers/make_zoo.py OUT TEXT_FOLDER ...            for compare.py
python tests/oracle/tokenizers/make_zoo.py --golden FILE TEXT_FOLDER ...  for tests/text/: smaller
    ones, with what Hugging Face makes of some texts; and the same for the tokenizers that stand in
    $PITH_TOKENIZERS as NAME/tokenizer.json, which are not copied
"""

import json
import os
import sys

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from compare import file_texts, random_texts

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def byte_level(texts, pre_tokenizer, size, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            show_progress=False,
            initial_alphabet=ALPHABET,
            special_tokens=["<|begin|>", "<|end|>"],
        ),
    )
    return tokenizer


def llama3(texts, size):
    P = pre_tokenizers
    tokenizer = byte_level(
        texts,
        P.Sequence(
            [
                P.Split(Regex(LLAMA3), "isolated"),
                P.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        size,
        ignore_merges=True,
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin|> $A",
                pair="<|begin|> $A <|begin|> $B",
                special_tokens=[("<|begin|>", 0)],
            ),
        ]
    )
    return tokenizer


def gpt2(texts, size):
    tokenizer = byte_level(texts, pre_tokenizers.ByteLevel(add_prefix_space=True), size)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_tokens(
        [
            AddedToken("  ", normalized=False),
            AddedToken("<mask>", lstrip=True),
            AddedToken("naive", single_word=True),
            AddedToken("the", rstrip=True),
        ]
    )
    return tokenizer


def digits(texts, size):
    P = pre_tokenizers
    tokenizer = byte_level(
        texts,
        P.Sequence(
            [P.Digits(individual_digits=True), P.Punctuation(), P.ByteLevel(add_prefix_space=False)]
        ),
        size,
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True, add_prefix_space=False),
            processors.TemplateProcessing(
                single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
            ),
        ]
    )
    tokenizer.add_tokens([AddedToken("Stra\u00dfe", normalized=True), AddedToken("\u212b")])
    return tokenizer


def splits(texts, size):
    P = pre_tokenizers
    return byte_level(
        texts,
        P.Sequence(
            [
                P.Split(Regex(r"\d{1,2}+x?"), "merged_with_previous"),
                P.Split("'", "merged_with_next"),
                P.Split(Regex(r"^\w+$|\W\b"), "contiguous"),
                P.Split(Regex(r"[\h_]+"), "isolated", invert=True),
                P.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        ),
        size,
        normalizers.NFD(),
    )


def sentencepiece(texts, size, pre_tokenizer, normalizer, decoder_parts, fuse=True):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=fuse))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(decoder_parts)
    lines = [l for t in texts for l in t.split("\n")][:20000]
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=size,
            show_progress=False,
            limit_alphabet=size // 6,
            special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)],
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def unknowns(texts, size):
    """No byte tokens: unk, fused or not, a prefix for later symbols, words split off."""
    tokenizer = Tokenizer(
        models.BPE(unk_token="[UNK]", fuse_unk=False, continuing_subword_prefix="##")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.normalizer = normalizers.NFKD()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            show_progress=False,
            limit_alphabet=80,
            special_tokens=["[UNK]"],
            continuing_subword_prefix="##",
        ),
    )
    return tokenizer


def make_zoo(texts, size):
    llama2_decoder = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    metaspace = lambda scheme: pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return {
        "llama3": llama3(texts, size),
        "gpt2": gpt2(texts, size),
        "digits": digits(texts, size),
        "splits": splits(texts, size),
        "llama2": sentencepiece(
            texts,
            size,
            None,
            normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            ),
            llama2_decoder,
        ),
        "metaspace_always": sentencepiece(
            texts,
            size,
            metaspace("always"),
            None,
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")],
        ),
        "metaspace_first": sentencepiece(
            texts,
            size,
            metaspace("first"),
            normalizers.Sequence(
                [normalizers.NFC(), normalizers.Replace(Regex(r"\s{2,}|\p{Cf}"), " ")]
            ),
            llama2_decoder,
            False,
        ),
        "unknowns": unknowns(texts, size),
    }


def golden_cases(tokenizer, number):
    """[text, ids, byte offsets, decoded text] of some texts."""
    specials = [t.content for t in tokenizer.get_added_tokens_decoder().values()][:12]
    texts = [
        "",
        " ",
        "a",
        "I'LL don'T 12345  x",
        "a  \n  b",
        "\n\n  if x:\n        return 1",
        "e\u0301",
        "\u0915\u094d\u0937\u093f \u0e01\u0e33",
        "X." + "".join(specials[:2]),
        "\u180e\U0001e042\U000323af",
        " \t \n",
        "\r\n\r\n",
        "\U0001f468\u200d\U0001f469 \u4e2d\u6587\u3042",
        "aaaa" * 30,
    ]
    texts += [t.decode(errors="replace") for t in random_texts(number, specials, 9)]
    cases = []
    for text in texts:
        encoding = tokenizer.encode(text)
        at = [0]
        for c in text:
            at.append(at[-1] + len(c.encode()))
        offsets = [at[i] for o in encoding.offsets for i in o]
        cases.append([text, encoding.ids, offsets, tokenizer.decode(encoding.ids)])
    return cases


def write_golden(path, texts):
    golden = [
        {"name": name, "tokenizer": json.loads(t.to_str()), "cases": golden_cases(t, 12)}
        for name, t in make_zoo(texts, 500).items()
    ]
    folder = os.environ.get("PITH_TOKENIZERS", "")
    for name in sorted(os.listdir(folder)) if folder else []:
        tokenizer = Tokenizer.from_file(os.path.join(folder, name, "tokenizer.json"))
        golden.append({"name": name, "cases": golden_cases(tokenizer, 18)})
    with open(path, "w") as file:
        lines = [json.dumps(entry, separators=(",", ":"), ensure_ascii=False) for entry in golden]
        file.write("[" + ",\n".join(lines) + "]\n")


def main():
    if sys.argv[1] == "--golden":
        out, folders = sys.argv[2], sys.argv[3:]
    else:
        out, folders = sys.argv[1], sys.argv[2:]
    texts = [t.decode(errors="replace") for t in file_texts(folders, 150000)]
    if sys.argv[1] == "--golden":
        return write_golden(out, texts)
    for name, tokenizer in make_zoo(texts, 2000).items():
        os.makedirs(os.path.join(out, name), exist_ok=True)
        tokenizer.save(os.path.join(out, name, "tokenizer.json"))


if __name__ == "__main__":
    main()
