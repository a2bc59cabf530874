#!/usr/bin/env python3
"""Writes the words into which Hugging Face's tokenizers splits strings, for the pre-tokenizers of published models.

    python3 -m venv build/venv && build/venv/bin/pip install tokenizers
    build/venv/bin/python tests/data/make_pretokenizer_fixtures.py [OUT [STRINGS]]

Writes tests/data/pretokenizers.json: {"strings": [...], "cases": [{"pre_tokenizer": as tokenizer.json has it, "words":
[words of each string]}]}. XPYD_PRETOKENIZERS names another such file for the test.  Written with tokenizers 0.23.3.
"""
import json
import os
import random
import sys

from tokenizers import Regex, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from make_tokenizer_fixtures import CONTRACTIONS, CONTROLS, DIFFERENT, DIGITS, EMOJI, LLAMA3, MARKS, PUNCTUATION, QWEN2, SENTENCES, SPACES

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK3 = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
             "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")


def split(regex):
    return Split(Regex(regex), "isolated")


def byte_level(use_regex):
    return ByteLevel(add_prefix_space=False, use_regex=use_regex)


PRE_TOKENIZERS = [
    split(GPT2), split(LLAMA3), split(QWEN2), split(TEKKEN),
    Sequence([Digits(individual_digits=True), byte_level(True)]),  # SmolLM, StarCoder, Granite
    Sequence([split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK3), byte_level(False)]),
    Sequence([split(r"[\r\n]"), split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆ]+"),
              split("\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"), split(r"\s+$"), split("[一-龥ࠀ-一가-\ud7ff]+"),
              Digits(individual_digits=True), byte_level(False)]),  # DeepSeek-LLM
    Sequence([split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), Digits(individual_digits=True), byte_level(False)]),
    split(r"\d*|'"),  # empty matches
]


def strings(n):
    rng = random.Random(5)
    words = " ".join(SENTENCES).split()
    kinds = [words, words, SPACES, SPACES, [" "], CONTRACTIONS, DIGITS, MARKS, EMOJI, CONTROLS, PUNCTUATION]
    out = ["", " ", "  a", "12345 6789", "don't  stop\n\n  now", "HTTPServer's XMLHttp2 camelCase ABC", "x\u00a0 y\u2028"]
    while len(out) < n:
        pieces = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 16))]
        if rng.random() < 0.2:
            pieces.insert(rng.randint(0, len(pieces)), chr(rng.choice([rng.randrange(0xd800), rng.randrange(0xe000, 0x110000)])))
        if DIFFERENT.isdisjoint("".join(pieces)):
            out.append("".join(pieces))
    return out


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "pretokenizers.json")
    texts = strings(int(sys.argv[2]) if len(sys.argv) > 2 else 40)
    cases = []
    for step in PRE_TOKENIZERS:
        holder = Tokenizer(models.BPE())
        holder.pre_tokenizer = step
        words = [[text[begin:end] for _, (begin, end) in step.pre_tokenize_str(text)] for text in texts]
        cases.append({"pre_tokenizer": json.loads(holder.to_str())["pre_tokenizer"], "words": words})
    with open(path, "w", encoding="utf-8") as out:
        out.write('{"strings":' + json.dumps(texts) + ',\n"cases":[\n')
        out.write(",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]}\n")


main()
