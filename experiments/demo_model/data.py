"""The demo model's language: its words, its tokenizer, and documents with facts, questions and answers.

A document states facts ("The key of box 17 is amber."), each about a different (thing, number), with values drawn at random.
The model can therefore answer a question only by reading the fact in its context. One tenth of all (thing, number) pairs is
held out: training neither states nor asks for them, and accuracy is measured on them alone.

Everything is drawn from one random.Random(seed), so the same seed gives the same documents. Only the standard library is used.
"""

import json
import random

N_NUMBERS = 400  # things are numbered 1 ... 400

NAMES = """Alice Bruno Carla David Elena Felix Grace Hugo Irene James Karin Louis Maria Nadia Oscar Paula Quentin
 Rosa Simon Teresa Ulrich Vera Walter Xenia Yusuf Zoe Anton Berta Cyril Dora Erik Frieda Peter Anna Bob John Mary Paul Tom
 Emma Jack Lucy Sam Mike Sara Adam Eva Max Ben Leo Mia Kate Mark Lisa Nina Ivan Olga Jane Joe Amy Dan Tim Ann Luke""".split()
# attribute, thing, values
KINDS = [
    ("key", "box", """amber jade ruby pearl opal coral ivory onyx quartz topaz garnet cobalt copper silver bronze iron
 glass paper linen velvet silk cotton leather marble granite chalk clay wax oak cedar maple bamboo""".split()),
    ("colour", "door", """red green blue yellow white black brown grey pink purple orange violet crimson scarlet teal
 indigo beige cream golden lilac maroon navy olive peach plum rose rust sand turquoise lime khaki mint""".split()),
    ("owner", "house", NAMES),
    ("drink", "table", """tea coffee milk water juice cocoa cider ale wine mead rum gin soda lemonade punch tonic
 sherry port brandy whisky vodka beer sake stout lager nectar broth soup cola mocha latte espresso""".split()),
    ("city", "train", """Paris London Rome Berlin Madrid Vienna Prague Warsaw Lisbon Dublin Oslo Stockholm Helsinki
 Athens Cairo Tokyo Kyoto Seoul Delhi Lima Quito Boston Chicago Denver Dallas Seattle Toronto Sydney Milan Naples Geneva Zurich""".split()),
    ("captain", "ship", NAMES),
]
# The beginning of a question, its end, and its weight in the draw.
QUESTIONS = [
    ("What is the", "?", 8), ("What's the", "?", 1), ("what is the", "?", 1), ("What is the", "", 1), ("Tell me the", ".", 2),
    ("Please tell me the", ".", 1), ("And the", "?", 1), ("Do you know the", "?", 1), ("The", "?", 1), ("Who is the", "?", 3),
]
# The end of a fact, the beginning of the next fact, and the weight in the draw.
GLUES = [(".", " The", 16), (".\n", "The", 3), (",", " the", 1), ("", " and the", 1), (";", " the", 1)]
HELLO = "Hello! Tell me some facts, then ask for one."
OTHER = "I only know facts such as: The key of box 17 is amber."
NOTED = "Noted."

SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_characters():
    """The characters by which GPT-2's tokenizer represents the 256 bytes."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        table[b] = chr(b) if b in own else chr(256 + extra)
        extra += b not in own
    return table


BYTE_CHARACTERS = byte_characters()


def word_list():
    words = ["'s", "user", "assistant", "system", "The", " The", "the", " the", " of", " is", " was", " not", " stated", " a", " an",
             " I", "I", " you", " me", " know", "Hello", "Hi", " some", " facts", " then", " ask", " for", " one", " only",
             " such", " as", "Noted", " and", "Who", " who", " are", "Please", " in", " to", " it", " my", " your"]
    for begin, _, _ in QUESTIONS:
        words += [w for word in split(begin) for w in (word, " " + word.strip())]
    for sentence in (HELLO, OTHER):
        words += sentence.replace(".", "").replace("!", "").replace(",", "").replace(":", "").replace(" ", "\0 ").split("\0")
    for attribute, thing, values in KINDS:
        words += [" " + attribute, " " + thing] + [" " + v for v in values]
    words += [f" {n}" for n in range(1, N_NUMBERS + 1)]
    return [w for w in dict.fromkeys(words) if len(w) > 1]


class Vocab:
    """The vocabulary. Ids 0 ... 255 are bytes; words and then special tokens follow."""

    def __init__(self):
        words = word_list()
        self.texts = [bytes([b]).decode("latin-1") for b in range(256)] + words + SPECIALS
        self.id = {text: i for i, text in enumerate(self.texts)}
        self.bos, self.eos, self.start, self.end, self.eot = (self.id[s] for s in SPECIALS)

    def __len__(self):
        return len(self.texts)

    def tokenizer_json(self):
        def spell(text):
            return "".join(BYTE_CHARACTERS[b] for b in text)

        vocab = {spell([b]): b for b in range(256)}
        for i in range(256, len(self.texts)):
            text = self.texts[i]
            vocab[text if text in SPECIALS else spell(text.encode())] = i
        bos = {"id": SPECIALS[0], "type_id": 0}
        return {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": self.id[s], "content": s, "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False, "special": True} for s in SPECIALS],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": GPT2_SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
            "post_processor": {"type": "TemplateProcessing",
                               "single": [{"SpecialToken": bos}, {"Sequence": {"id": "A", "type_id": 0}}],
                               "pair": [{"SpecialToken": bos}, {"Sequence": {"id": "A", "type_id": 0}},
                                        {"SpecialToken": {**bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
                               "special_tokens": {SPECIALS[0]: {"id": SPECIALS[0], "ids": [self.bos],
                                                                "tokens": [SPECIALS[0]]}}},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                      "vocab": vocab, "merges": []},
        }


def held_out(kind, number):
    """Whether training never sees this (kind, number)."""
    return (kind * 7 + number * 3) % 10 == 0


class Facts:
    """Keys (kind, number) with their values. `absent` holds similar keys that the document does not state."""

    def __init__(self, rng, count, may_ask=lambda kind, number: not held_out(kind, number), may_state=None):
        may_state = may_state or may_ask
        # Some documents use few numbers, so that many keys share them; some use few kinds.
        top = rng.choice([n for n in (16, 40, 100, 400) if n * len(KINDS) * 0.55 >= count])
        kinds = list(range(len(KINDS)))
        narrow = rng.randint(1, len(KINDS))
        if narrow * top * 0.55 >= count:
            kinds = rng.sample(kinds, narrow)
        first = rng.randint(0, N_NUMBERS - top)
        universe = [(k, first + n) for k in kinds for n in range(1, top + 1) if may_state(k, first + n)]
        rng.shuffle(universe)
        self.stated = universe[:count]
        self.absent = [key for key in universe[count:] if may_ask(*key)]
        if not self.absent:
            self.absent = [(k, n) for k in range(len(KINDS)) for n in range(1, N_NUMBERS + 1)
                           if may_ask(k, n) and (k, n) not in set(self.stated)]
        self.asked = [key for key in self.stated if may_ask(*key)]
        self.value = {key: rng.choice(KINDS[key[0]][2]) for key in self.stated}


def sentence(key, value):
    attribute, thing, _ = KINDS[key[0]]
    return f"The {attribute} of {thing} {key[1]} is {value}."


def question(rng, key):
    attribute, thing, values = KINDS[key[0]]
    forms = QUESTIONS if values is NAMES else QUESTIONS[:-1]  # "Who is the" asks for a name
    begin, mark, _ = rng.choices(forms, [form[2] for form in forms])[0]
    return f"{begin} {attribute} of {thing} {key[1]}{mark}"


def answer(key, value):
    return sentence(key, value if value is not None else "not stated")


def split(text):
    """Splits the texts of this file (ASCII) into words as the tokenizer's regex does."""
    out, i = [], 0

    def kind(c):
        return 0 if c.isalpha() else 1 if c.isdigit() else 2 if not c.isspace() else 3

    while i < len(text):
        if text.startswith("'s", i):
            out.append("'s")
            i += 2
            continue
        j = i + 1 if text[i] == " " and i + 1 < len(text) and not text[i + 1].isspace() else i
        k = kind(text[j])
        e = j + 1
        if k != 3:
            while e < len(text) and kind(text[e]) == k:
                e += 1
        out.append(text[i:e])
        i = e
    return out


class Encoder:
    def __init__(self, vocab):
        self.vocab, self.cache = vocab, {}

    def __call__(self, text):
        ids = self.cache.get(text)
        if ids is None:
            ids = []
            for word in split(text):
                i = self.vocab.id.get(word)
                ids += [i] if i is not None else list(word.encode())
            if len(self.cache) < 200_000:
                self.cache[text] = ids
        return ids


class Document:
    """Token ids, and the loss weight of each."""

    def __init__(self, vocab, encode):
        self.v, self.encode = vocab, encode
        self.ids, self.weights = [vocab.bos], [0.0]
        self.lookups = []  # (position of the value token, whether the fact is stated)

    def add(self, ids, weight=0.0):
        self.ids += ids
        self.weights += [weight] * len(ids)

    def header(self, role):
        self.add([self.v.start] + self.encode(role) + [self.v.end, 10, 10])

    def answer(self, text, stop, before="", value=True, stated=True):
        """Adds an answer. `before` is the space or line break that the model must write first."""
        ids = self.encode(before + text) + [stop]
        first = len(self.ids)
        self.add(ids, 0.3)
        if value:
            at = first + 6 + (before == "\n")
            self.lookups.append((at, stated))
            self.weights[at : -2] = [1.0] * (len(self.ids) - at - 2)  # a word may be several tokens


def make_document(rng, vocab, encode, length, odd=0.03, style=None):
    """A training document of about `length` tokens at most. A share `odd` of the documents has no facts."""
    doc = Document(vocab, encode)
    style = style or rng.choices(("chat", "plain", "stream", "odd"), (0.5, 0.15, 0.32, odd))[0]
    if style == "odd":
        return odd_document(rng, doc, length)
    share = rng.uniform(0.3, 0.9)  # share of the tokens that states facts; the rest asks for them
    count = max(1, int((length - 12) * share / 8.3))
    if length <= 96:
        count = rng.randint(1, count)
    facts = Facts(rng, count)
    mark, link, _ = rng.choices(GLUES, [weight for _, _, weight in GLUES])[0]
    after = "\n" if mark == ".\n" else " "  # between the facts and the question
    order = facts.stated
    if style != "stream" and rng.random() < 0.1:  # values that are no words of the vocabulary
        for key in order:
            if rng.random() < 0.3:
                facts.value[key] = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7)))

    opening = "The" if rng.random() < 0.93 else "the"

    def state(keys):
        ids = []
        for i, key in enumerate(keys):  # in pieces, so that the encoder's cache finds them again
            rest = sentence(key, facts.value[key])[3:-1]
            ids += encode(mark) + encode(link + rest) if i else encode(opening + rest)
        return ids + encode(".") if keys else ids

    def pick():
        if rng.random() < 0.22:
            return rng.choice(facts.absent), None
        key = rng.choice(seen)
        return key, facts.value[key]

    if style == "stream":  # stream: facts, some of them repeated, which gives many look-ups a document
        doc.add(encode("The" + sentence(order[0], facts.value[order[0]])[3:]))
        seen, rest = [order[0]], order[1:]
        while len(doc.ids) + 12 < length:
            again = not rest or rng.random() > share
            key = rng.choice(seen) if again else rest.pop(0)
            if again:
                doc.lookups.append((len(doc.ids) + 6, True))
            else:
                seen.append(key)
            doc.add(encode(" " + sentence(key, facts.value[key])))
            doc.weights[-2] = float(again)
        return doc
    seen = order
    if style == "plain":
        doc.add(state(order))
        while len(doc.ids) + 40 < length:
            key, value = pick()
            doc.add(encode(after) if after == "\n" else [])
            doc.add(encode((after if after == " " else "") + question(rng, key)))
            doc.answer(answer(key, value), vocab.eos, after, stated=value is not None)
        return doc
    # chat: the facts are in the system message, in the first user message, or spread over several turns
    where = rng.choices(("system", "user", "turns"), (0.4, 0.4, 0.2))[0]
    rest = []
    if where == "system":
        doc.header("system")
        doc.add(state(order) + [vocab.eot])
    elif where == "turns":
        cut = rng.randint(1, len(order))
        seen, rest = order[:cut], order[cut:]
    begin = where != "system"
    while True:
        room = length - len(doc.ids)
        told = []
        if begin:
            told = seen
        elif rest and rng.random() < 0.3:
            take = rng.randint(1, len(rest))
            told, rest = rest[:take], rest[take:]
            seen = seen + told
        if room < 9 * len(told) + 44:
            break
        doc.header("user")
        doc.add(state(told))
        if told and rng.random() < 0.1:
            doc.add([vocab.eot])
            doc.header("assistant")
            doc.answer(NOTED, vocab.eot, value=False)
        else:
            key, value = pick()
            doc.add(encode(after) * (told != [] and after == "\n") +
                    encode((" " if told and after == " " else "") + question(rng, key)) + [vocab.eot])
            doc.header("assistant")
            doc.answer(answer(key, value), vocab.eot, stated=value is not None)
        begin = False
    return doc


def odd_document(rng, doc, length):
    """A document without facts: greetings, nonsense, and questions about facts that nobody stated."""
    for _ in range(max(1, length // 60)):
        if len(doc.ids) + 60 > length:
            break
        doc.header("user")
        draw = rng.random()
        if draw < 0.3:
            doc.add(doc.encode(rng.choice(("Hello", "Hi", "Hello!", "Hi!", "Hello.", "Hi there", "Hello there!"))))
            reply = HELLO
        elif draw < 0.6:
            key = Facts(rng, 1).stated[0]
            doc.add(doc.encode(question(rng, key)))
            reply = answer(key, None)
        else:
            ids = []
            for _ in range(rng.randint(1, 8)):
                if rng.random() < 0.5:
                    ids += doc.encode(doc.v.texts[rng.randrange(256, len(doc.v) - len(SPECIALS))])
                else:
                    ids += [32] + [rng.choice(b"abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6))]
            doc.add(ids[:30])
            reply = OTHER
        doc.add([doc.v.eot])
        doc.header("assistant")
        doc.answer(reply, doc.v.eot, value=False)
    return doc


def make_exam(rng, vocab, encode, length, stated=1, absent=0):
    """A context and questions about it. The facts, the question and the beginning of the answer take `length` tokens, give or
    take a sentence. `stated` questions ask for a fact of the context, `absent` ones for a fact that it lacks. All of them
    ask about held-out pairs. Returns [(messages, expected answer, prompt ids)]; a question does not contain the others."""
    overhead = 1 + 5 + 12 + 1 + 5
    facts = Facts(rng, max(2, int((length - overhead) / 8)), may_ask=held_out, may_state=lambda kind, number: True)
    if len(facts.asked) < stated or len(facts.absent) < absent:
        return make_exam(rng, vocab, encode, length, stated, absent)
    text = " ".join(sentence(key, facts.value[key]) for key in facts.stated)
    system = rng.random() < 0.5
    exam = []
    for key in rng.sample(facts.asked, stated) + rng.sample(facts.absent, absent):
        ask = question(rng, key)
        messages = [{"role": "user", "content": text + " " + ask}]
        if system:
            messages = [{"role": "system", "content": text}, {"role": "user", "content": ask}]
        doc = Document(vocab, encode)
        for message in messages:
            doc.header(message["role"])
            doc.add(encode(message["content"]) + [vocab.eot])
        doc.header("assistant")
        exam.append((messages, answer(key, facts.value.get(key)), doc.ids))
    return exam


if __name__ == "__main__":
    vocab = Vocab()
    encode = Encoder(vocab)
    rng = random.Random(1)
    print(len(vocab), "tokens")
    for style in ("chat", "plain", "stream", "odd"):
        doc = make_document(rng, vocab, encode, 160, style=style)
        print("----", style, len(doc.ids), doc.lookups)
        print("".join(vocab.texts[i] for i in doc.ids))
        print([(vocab.texts[i], w) for i, w in zip(doc.ids, doc.weights) if w])
    for messages, expected, ids in make_exam(rng, vocab, encode, 100, 1, 1):
        print(messages, expected, len(ids))
    print(json.dumps(vocab.tokenizer_json())[:300])
