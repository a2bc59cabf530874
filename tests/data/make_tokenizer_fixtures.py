#!/usr/bin/env python3
"""Trains small tokenizers with Hugging Face's tokenizers and writes how they encode and decode many strings.

    python3 -m venv build/venv && build/venv/bin/pip install tokenizers
    build/venv/bin/python tests/data/make_tokenizer_fixtures.py [FOLDER WITH stories260k's tokenizer.json]

Writes tests/data/tokenizers/:
  NAME.json      the tokenizer
  strings.txt    one string per line: JSON, or "x" and hexadecimal where it is not UTF-8
  NAME.txt       for each string, fields with tabs between: ids; decoded text as JSON, "=" if it is the string;
                 ids with special tokens read as plain text, "=" if the same
  NAME.ids.txt   random ids: ids; decoded without special tokens; decoded with them, "=" if the same
Texts are decoded with errors="replace" before they are encoded.  Written with tokenizers 0.23.3.
"""
import json
import os
import random
import sys
import unicodedata
from pydoc_data.topics import topics

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizers")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")

# Characters that libpcre2 with Unicode 14 and tokenizers with Unicode 16 class differently. No string has them. Run this with
# Python 3.11, whose unicodedata is Unicode 14.
ASSIGNED = pre_tokenizers.Split(Regex(r"[\p{L}\p{M}\p{N}\p{P}\p{S}]"), "removed")
DIFFERENT = {"\u180e"} | {chr(c) for c in [*range(0xd800), *range(0xe000, 0x110000)]
                          if unicodedata.category(chr(c)) == "Cn" and not ASSIGNED.pre_tokenize_str(chr(c))}

SENTENCES = """All human beings are born free and equal in dignity and rights.
Tous les êtres humains naissent libres et égaux en dignité et en droits.
Alle Menschen sind frei und gleich an Würde und Rechten geboren. Straße, Größe.
Todos los seres humanos nacen libres e iguales: ¿verdad? ¡Sí, señor!
Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.
Все люди рождаются свободными и равными в своём достоинстве и правах.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.
يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.
כל בני האדם נולדו בני חורין ושווים בערכם.
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।
人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心。
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.
มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ
Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.
for (int i = 0; i < n_tokens; ++i) {\n\t\tsum += x[i] * y[i];  // dot\n\t}\r\n    return sum;
It's 10:45 on 2024-03-07; he'll pay $1,234,567.89 (we'd say "cheap"), you're sure I'VE seen they'Re DON'T""".split("\n")

EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "1️⃣", "🧑‍🚀", "✈", "🤷🏿‍♀️", "😶‍🌫️"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\r", "\v", "\f", "\u00a0", "\u0085", "\u2003",
          "\u3000", "\u2028", "\u200b", "\ufeff", "\u180e", "\u202f", " \t ", "    "]
CONTRACTIONS = ["'s", "'S", "'\u017f", "'t", "'RE", "'re", "'ve", "'Ve", "'m", "'ll", "'lL", "'d", "'D", "\u2019s", "'x",
                "'", "''s", "'r", "'v", "'l", "'\u017fx", "don't", "I'M"]
DIGITS = ["0", "7", "42", "123", "1234", "999999", "1234567", "½", "²", "٣٤", "Ⅷ", "𝟘𝟙", "①", "〇", "१२३", "3.14", "1e-9"]
MARKS = ["e\u0301", "\u00e9", "a\u0323\u0307", "a\u0307\u0323", "\u0301", "o\u0302\u0301", "\u1e69", "s\u0323\u0307", "\u212b",
         "\u2126", "\uf900", "\u0344", "\u0340", "\u1100\u1161\u11a8", "\uac01", "\uac00\u11a8", "\u0958", "\u0915\u093c", "\u2adc",
         "\u0f43", "\ufb1d", "a\u0345\u0301", "q\u0307\u0323\u0301\u0334", "\u0b47\u0b57", "\u1112\u1175", "\ufb01", "\u00c5",
         "A\u030a", "\u0130", "\U0001d15e", "\u0cc6\u0cc2\u0cd5", "\u3099\u304b\u3099", "\u0061\u05ae\u0300"]
CONTROLS = ["\0", "\x01", "\x1b[0m", "\x7f", "\x1c", "\x1f", "\u0080", "\u009f", "\u00ad", "\ufffe", "\uffff", "\ufffd",
            "\U0010ffff", "\ue000", "\u0378", "\u202e", "\u2060"]
PUNCTUATION = list("!\"#$%&()*+,-./:;<=>?@[\\]^_`{|}~") + ["...", "!!!\n", "?\r\n\n", "--", "//", "«", "»", "—", "、", "。", "¿", "€",
                                                          "©", "▁", "▁▁", "Ġ", "Ċ", "<0x41>", "<0x0A>"]
LETTERS = list("abcXYZ") + ["hello", "World", "the", "ing", "TEST", "ñ", "ß", "İ", "ǅ", "Ж", "привет", "λ", "世界", "日本語", "한국어",
                            "हिन्दी", "ไทย", "עברית", "عربى", "𝒜", "𐐷", "ª", "ʰ", "𠮷", "ꙮ", "\u05d0\u05b8", "\u1c80"]
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>",
            "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<left>",
            "<right>", "<both>", "<word>", "wort", "caf\u00e9", "cafe\u0301", "ab cd", "abcd", "<mask>", "\u00e9!", "<|im_en", "</s",
            "<|eot_id", "<|\u00e9\u00e8|>"]


def strings(rng):
    text = "\n".join(topics[key] for key in sorted(topics))
    out = ["", " ", "  ", "▁", " ▁", "a", " a", "a ", "\n", "\r\n", "\t\n ", "\0"]
    out += [" " * n for n in (3, 4, 5, 8, 16, 17, 31, 64, 301)]
    out += [" " * n + "x" for n in (1, 2, 3, 4, 7, 40)]
    out += ["x" + "\n" * n + " " * m + "y" for n in range(4) for m in range(4)]
    out += ["7" * n for n in range(1, 14)] + ["a" * n for n in (2, 3, 10, 63, 64, 65, 1000)]
    out += ["\u0301" * 40 + "a", "a" + "\u0301\u0323" * 20, "e\u0301" * 30]
    for word in CONTRACTIONS:
        out += [word, "I" + word, "I" + word + "x", " " + word + " ", "9" + word]
    for group in (EMOJI, SPACES, DIGITS, MARKS, CONTROLS, PUNCTUATION, LETTERS, SPECIALS):
        for item in group:
            out += [item, "a" + item + "b", " " + item + " "]
    for sentence in SENTENCES:
        out.append(sentence)
        for _ in range(8):
            a = rng.randrange(len(sentence))
            out.append(sentence[a:a + rng.randrange(1, 40)])
    for _ in range(180):
        a = rng.randrange(len(text))
        out.append(text[a:a + rng.randrange(1, 70)])
    groups = [EMOJI, SPACES, SPACES, CONTRACTIONS, DIGITS, MARKS, CONTROLS, PUNCTUATION, LETTERS, LETTERS]
    for _ in range(560):
        out.append("".join(rng.choice(rng.choice(groups)) for _ in range(rng.randrange(2, 9))))
    for _ in range(180):
        out.append("".join(rng.choice(SPECIALS if rng.random() < .5 else rng.choice(groups))
                           for _ in range(rng.randrange(2, 7))))
    for _ in range(130):  # any code point
        out.append("".join(chr(c) for c in (rng.randrange(*rng.choice([(0x80, 0x3000), (0x3000, 0xd800), (0xe000, 0x10000),
                                                                       (0x10000, 0x20000), (0x20000, 0x110000)]))
                                            for _ in range(rng.randrange(1, 8)))))
    out = [s.encode() for s in out]
    out += [bytes.fromhex(h) for h in """ff c0 c080 e28080 e280 e2 f09f98 f09f9880ff eda080 edbfbf f4908080 f8888080 c3 c328 80 bfbf
        e0808f f0808080 41c3 c3a9c3 61e282acff62 f09f98f09f9880 20ff20 e2e282ac fffefd cc 65cc 0aff0a""".split()]
    for _ in range(170):
        parts = [rng.choice(rng.choice(groups)).encode() for _ in range(rng.randrange(1, 5))]
        raw = bytearray(b"".join(parts))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(raw) + 1)
            if rng.random() < .5 and at < len(raw):
                del raw[at]
            else:
                raw.insert(at, rng.randrange(0x80, 0x100))
        out.append(bytes(raw))
    return [s for s in dict.fromkeys(out) if DIFFERENT.isdisjoint(s.decode(errors="replace"))]


def corpus():
    text = [topics[key] for key in sorted(topics)]
    return text + SENTENCES * 12 + ["".join(EMOJI)] * 5 + ["    " * 8 + "x\n\n"] * 20


def byte_level(n_merges, pre_tokenizer):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=256 + n_merges, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def special(*contents):
    return [AddedToken(content, special=True, normalized=False) for content in contents]


def split(regex):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(regex), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def llama3():
    tokenizer = byte_level(700, split(LLAMA3))
    tokenizer.add_special_tokens(special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                                         "<|eot_id|>"))
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=bos + " $A", pair=f"{bos} $A {bos}:1 $B:1",
                                      special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    out = json.loads(tokenizer.to_str())
    out["model"]["ignore_merges"] = True
    # Only ignore_merges produces some words.
    out["model"]["merges"] = [m for i, m in enumerate(out["model"]["merges"]) if i % 9 != 8]
    return out


def qwen2():
    tokenizer = byte_level(700, split(QWEN2))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken(c, special=False, normalized=False) for c in ("<tool_call>", "</tool_call>")])
    out = json.loads(tokenizer.to_str())
    out["model"]["merges"] = [" ".join(merge) for merge in out["model"]["merges"]]  # the older form
    return out


def gpt2():
    tokenizer = byte_level(500, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|\u00e9\u00e8|>"))
    tokenizer.add_tokens([AddedToken("\u00e9!"), AddedToken("ab cd"), AddedToken("abcd", normalized=False)])
    return json.loads(tokenizer.to_str())


def sentencepiece(n_merges, n_chars):
    """Returns a model whose vocab is <unk> <s> </s>, bytes, characters and merges. The caller adds the parts around it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|[^▁]+"), "isolated")
    controls = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=len(controls) + n_chars + n_merges, limit_alphabet=n_chars, show_progress=False, special_tokens=controls))
    out = json.loads(tokenizer.to_str())
    out["added_tokens"] = [token for token in out["added_tokens"] if token["id"] < 3]
    out["model"].update(unk_token="<unk>", fuse_unk=True, byte_fallback=True, dropout=None)
    out["post_processor"] = json.loads(processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]).__getstate__())
    out["normalizer"] = out["pre_tokenizer"] = None
    return out


SPM_DECODER = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}


def llama2():
    out = sentencepiece(700, 90)
    out["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    out["decoder"] = SPM_DECODER
    n = len(out["model"]["vocab"])
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    out["added_tokens"] += [{"id": n, "content": "ab cd", **flags}, {"id": n + 1, "content": "<both>", **flags}]
    return out


def mistral():
    """Like Mistral v0.3 and newer conversions of Llama 2: Metaspace, prepended only at the beginning."""
    out = sentencepiece(600, 80)
    out["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    out["decoder"] = SPM_DECODER
    n = len(out["model"]["vocab"])
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    out["added_tokens"] += [{"id": n + i, "content": c, **flags} for i, c in enumerate(("[INST]", "[/INST]"))]
    return out


def line_of(raw):
    try:
        return text_of(raw.decode())
    except UnicodeDecodeError:
        return "x" + raw.hex()


def text_of(text):
    # Also escapes characters that editors and line readers take for line ends.
    out = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if c in "\x7f\x85\u2028\u2029" else c for c in out)


def write(name, lines):
    with open(os.path.join(HERE, name), "w", encoding="utf-8", newline="\n") as f:
        f.write("".join(line + "\n" for line in lines))


def expect(name, path, raws, rng):
    # Each setting needs its own tokenizer, because a tokenizer's cache would not notice the change.
    tokenizer, plain = Tokenizer.from_file(path), Tokenizer.from_file(path)
    plain.encode_special_tokens = True
    lines = []
    for raw in raws:
        text = raw.decode("utf-8", errors="replace")
        ids = tokenizer.encode(text).ids
        other = plain.encode(text).ids
        back = tokenizer.decode(ids)
        lines.append("\t".join([" ".join(map(str, ids)), "=" if back == text else text_of(back),
                                "=" if ids == other else " ".join(map(str, other))]))
    write(name + ".txt", lines)
    lines = []
    n = tokenizer.get_vocab_size()
    added = sorted(tokenizer.get_added_tokens_decoder())
    for _ in range(260):
        ids, kind = [], rng.random()
        for _ in range(rng.randrange(1, 12)):
            pick = rng.random()
            if pick < .2:
                ids.append(rng.choice(added))
            elif pick < .55 and kind < .7:  # bytes, in either kind of vocabulary
                ids.append(rng.randrange(0, 262))
            elif pick < .6:
                ids.append(n + rng.randrange(5))  # no token
            else:
                ids.append(rng.randrange(n))
        if kind > .8:  # a valid run of byte tokens, perhaps spoiled
            ids += [t for b in rng.choice(EMOJI + LETTERS).encode()
                    for t in [tokenizer.token_to_id(f"<0x{b:02X}>")] if t is not None]
            ids += [rng.randrange(n)] * rng.randrange(2)
        skipped, kept = tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)
        lines.append("\t".join([" ".join(map(str, ids)), text_of(skipped), "=" if kept == skipped else text_of(kept)]))
    write(name + ".ids.txt", lines)


def main():
    os.makedirs(HERE, exist_ok=True)
    rng = random.Random(7)
    raws = strings(rng)
    write("strings.txt", [line_of(raw) for raw in raws])
    for make in (llama3, qwen2, gpt2, llama2, mistral):
        name = make.__name__
        path = os.path.join(HERE, name + ".json")
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            json.dump(make(), f, ensure_ascii=False, separators=(",", ":"))
        expect(name, path, raws, rng)
    if len(sys.argv) > 1:
        expect("stories260k", os.path.join(sys.argv[1], "tokenizer.json"), raws, rng)
    size = sum(os.path.getsize(os.path.join(HERE, name)) for name in os.listdir(HERE))
    print(f"{len(raws)} strings, {size} bytes in all")


if __name__ == "__main__":
    main()
