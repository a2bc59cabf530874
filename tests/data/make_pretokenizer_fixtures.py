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
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from make_tokenizer_fixtures import CONTRACTIONS, CONTROLS, DIGITS, EMOJI, LLAMA3, MARKS, PUNCTUATION, QWEN2, SENTENCES, SPACES

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
          r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + ENDING +
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + ENDING +
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
MARKED = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK3 = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
             "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
BEHAVIORS = "isolated removed merged_with_previous merged_with_next contiguous".split()


def split(regex, behavior="isolated", invert=False):
    return Split(Regex(regex), behavior, invert)


def byte_level(use_regex):
    return ByteLevel(add_prefix_space=False, use_regex=use_regex)


PRE_TOKENIZERS = [
    split(GPT2), split(LLAMA3), split(QWEN2), split(CL100K), split(TEKKEN), split(O200K), split(MARKED),
    split(LLAMA3, "removed", True), split(O200K, "removed", True),
    Sequence([Digits(individual_digits=True), byte_level(True)]),  # SmolLM, StarCoder, Granite
    Sequence([Digits(individual_digits=False), byte_level(True)]),
    Sequence([split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK3), byte_level(False)]),
    Sequence([split(r"[\r\n]"), split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆ]+"),
              split("\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"), split(r"\s+$"), split("[一-龥ࠀ-一가-\ud7ff]+"),
              Digits(individual_digits=True), byte_level(False)]),  # DeepSeek-LLM
    Sequence([split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), Digits(individual_digits=True), byte_level(False)]),
    Sequence([split("[0-9][0-9][0-9]"), Punctuation("contiguous"), split(r"^ +|.$")]),
    *[Punctuation(behavior) for behavior in BEHAVIORS],
    *[Split(" ", behavior, invert) for behavior in BEHAVIORS for invert in (False, True)],
    *[split(r"\d*|'", behavior, invert) for behavior in BEHAVIORS for invert in (False, True)],  # empty matches
    Split("[.]", "merged_with_next"),
    *[split(regex) for regex in (r"\w+", r"\W+", r"[\w\-]+?", r"[^\S\n]+", r"\D+", r"\p{Han}+", r"[^\p{Han}]+", r"\P{L}+",
                                 r"\p{^N}", r"[\p{L}-]{2,}", r"\s{,2}", r"(?<=\s)\S+(?= )|\u0301|\v", r"(?i)[a-k]+s|\x{e9}",
                                 r"(?<!\p{L})(?:\p{Lu}|\d){2,3}?(?!x)|(?>\s+)\S", r"\p{So}+|\p{Sk}|\p{Cf}|\p{Cc}")],
]


def strings(n):
    rng = random.Random(5)
    words = " ".join(SENTENCES).split()
    kinds = [words, words, SPACES, SPACES, [" "], CONTRACTIONS, DIGITS, MARKS, EMOJI, CONTROLS, PUNCTUATION]
    out = ["", " ", "  a", "12345 6789", "don't  stop\n\n  now", "HTTPServer's XMLHttp2 camelCase ABC", "x\u180e y\u00a0\u1c89"]
    while len(out) < n:
        pieces = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 16))]
        if rng.random() < 0.2:
            pieces.insert(rng.randint(0, len(pieces)), chr(rng.choice([rng.randrange(0xd800), rng.randrange(0xe000, 0x110000)])))
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
