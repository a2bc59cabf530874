"""Measures how many drafts of the demo model's head its trunk would accept, or writes golden values for other implementations.

    python experiments/demo_model/verify_mtp.py [--folder model/demo] [--golden tests/model/golden_mtp.json]

A draft counts as right if the trunk's greedy token is the same. The questions ask about (thing, number) pairs that training
never saw. With --golden, the script writes instead the head's tokens and some logits for three prompts.
"""

import argparse
import json
import random

import torch

import data
from model import one_back
from verify import load, load_head

STEPS = 4
LENGTHS = ((128, 200), (512, 200), (1500, 80), (3500, 24))  # tokens of context, questions


@torch.no_grad()
def said_by(trunk, ids, guess, stop):
    """The trunk's greedy tokens after ids up to and including `stop`, and its output at every position. A right `guess` makes
    one forward pass enough."""
    n = len(ids)
    while True:
        hidden = trunk.hidden(torch.tensor([ids + guess]))
        best = trunk.logits(hidden[0, n - 1 :]).argmax(-1).tolist()
        same = next((i for i, (a, b) in enumerate(zip(guess, best)) if a != b), len(guess))
        if same == len(guess) and guess[-1] == stop:
            return guess, hidden
        guess = guess[:same] + best[same : same + 1]


@torch.no_grad()
def measure(args):
    trunk = load(args.folder)
    head = load_head(trunk, args.folder)
    vocab = data.Vocab()
    encode = data.Encoder(vocab)
    print("tokens questions  right: draft 1      2      3      4  tokens a pass with 1    2    3    4 drafts")
    for length, questions in [pair for pair in LENGTHS if args.length in (0, pair[0])]:
        right, asked, tokens, passes = [0] * STEPS, [0] * STEPS, 0, [0] * STEPS
        for index in range(questions // 4):
            for _, expected, ids in data.make_exam(random.Random(args.seed + 10_000 * length + index), vocab, encode, length, 3, 1):
                answer, hidden = said_by(trunk, ids, encode(expected) + [vocab.eot], vocab.eot)
                n, places = len(ids), len(answer) - 1  # the prefill computes the first token
                drafts = head(torch.tensor([ids + answer]), one_back(hidden), n + torch.arange(places)[None], STEPS, free=True)
                accepted = [0] * places
                for i in range(places):
                    for step in range(min(STEPS, places - i)):
                        asked[step] += 1
                        if int(drafts[step][0, i].argmax()) != answer[i + step + 1]:
                            break
                        right[step] += 1
                        accepted[i] += 1
                tokens += places
                for k in range(STEPS):
                    at = 0
                    while at < places:
                        at += min(accepted[at], k + 1) + 1
                        passes[k] += 1
        print(f"{length:>6} {questions:>9}        ", *(f"{r / a:>6.1%}" for r, a in zip(right, asked)), " " * 11,
              *(f"{tokens / p:.2f}" for p in passes), flush=True)


@torch.no_grad()
def golden(args):
    """Writes for each prompt: `argmax`, the head's first draft at every position p, from x_p and the trunk's output at p - 1
    (zeros at p = 0); `next`, the trunk's greedy token after the prompt; `drafts`, the head's tokens from there on, where each
    draft reads the one before; `logits`, [position, token, value] of first drafts. All of it is f32 on the bf16 weights."""
    trunk = load(args.folder)
    head = load_head(trunk, args.folder)
    vocab = data.Vocab()
    encode = data.Encoder(vocab)
    exams = [data.make_exam(random.Random(seed), vocab, encode, n, 1, 0)[0][2] for seed, n in ((11, 60), (12, 150))]
    prompts = [[vocab.bos] + encode("The key of box 17 is amber. The owner of house 3 is Grace. The key of box 17 is"), *exams]
    out, closest = [], 1e9
    for ids in prompts:
        hidden = trunk.hidden(torch.tensor([ids]))
        following = int(trunk.logits(hidden[0, -1]).argmax())
        given = torch.tensor([ids + [following]])
        before = one_back(torch.cat((hidden, hidden[:, -1:]), 1))
        every = head(given, before, torch.arange(len(ids))[None], 1)[0][0]
        drafts = [said[0, 0] for said in head(given, before, torch.tensor([[len(ids)]]), STEPS, free=True)]
        best = torch.cat((every, torch.stack(drafts))).topk(2)
        closest = min(closest, (best.values[:, 0] - best.values[:, 1]).min().item())
        places = [0, 1, len(ids) // 2, len(ids) - 1]
        out.append({"ids": ids, "argmax": every.argmax(-1).tolist(), "next": following,
                    "drafts": [int(said.argmax()) for said in drafts],
                    "logits": [[p, token, round(every[p, token].item(), 4)]
                               for p in places for token in (int(every[p].argmax()), ids[-1], 300)]})
    with open(args.golden, "w", encoding="utf-8") as file:
        file.write("[" + ",\n".join(json.dumps(prompt) for prompt in out) + "]\n")
    print(f"the closest second is {closest:.4f} behind")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="model/demo")
    parser.add_argument("--golden", default="", help="the file to write")
    parser.add_argument("--length", type=int, default=0, help="measure only this context length")
    parser.add_argument("--seed", type=int, default=7000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    (golden if args.golden else measure)(args)


if __name__ == "__main__":
    main()
