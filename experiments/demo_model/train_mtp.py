"""Trains a multi-token prediction head for the demo model, whose own weights do not change: see README.md.

The target of the head is the trunk's output, not the document: its probabilities at every token of an answer.
"""

import argparse
import math
import os
import random
import time

import torch
import torch.nn.functional as F

import data
from model import Head, one_back
from train import agree, average_gradients, fork_workers
from verify import load

STEPS = 4  # drafts from one position
STEP_WEIGHTS = (1.0, 0.8, 0.6, 0.5)  # earlier drafts weigh more, because they are used more often
UNKNOWN = 1 / 64  # share of positions without the trunk's output, as after a prefix from the cache


def batch_of(rng, vocab, encode, length, count, most):
    """Returns ids; for each document at most `most` positions inside its answers from which to draft; and how many tokens of
    the answer follow each of them, as a mask over the steps. Padding positions have an empty mask."""
    ids = torch.full((count, length), vocab.eos, dtype=torch.long)
    starts, follow = torch.zeros(count, most, dtype=torch.long), torch.zeros(count, most, STEPS)
    for row in range(count):
        places = []
        while not places:
            doc = data.make_document(rng, vocab, encode, length, style=rng.choices(("chat", "plain", "odd"), (0.75, 0.2, 0.05))[0])
            said = [weight > 0 for weight in doc.weights[:length]] + [False] * (length + STEPS)
            places = [p for p in range(length) if said[p] and said[p + 1]]
        n = min(len(doc.ids), length)
        ids[row, :n] = torch.tensor(doc.ids[:n])
        places = sorted(rng.sample(places, min(most, len(places))))
        starts[row, : len(places)] = torch.tensor(places)
        for i, p in enumerate(places):
            for step in range(STEPS):  # up to the end of the answer, not into the next one
                if not said[p + step + 1]:
                    break
                follow[row, i, step] = 1
    return ids, starts, follow


def train(args, rank):
    trunk = load(args.folder)
    trunk.requires_grad_(False)
    vocab = data.Vocab()
    encode = data.Encoder(vocab)
    rng = random.Random(args.seed * 1000 + rank)
    torch.manual_seed(args.seed * 1000 + rank)
    head = Head(trunk, args.seed)
    if args.start:
        head.load_state_dict(torch.load(args.start))
    else:
        beginning = random.Random(args.seed)
        head.begin_with_recall([batch_of(beginning, vocab, encode, 256, 8, 1)[0] for _ in range(16)])
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.01)
    plan = [tuple(float(x) for x in part.split(":")) for part in args.plan.split(",")]
    total, start, step, tokens = sum(p[2] for p in plan) * 60, time.time(), 0, 0
    sums = []
    for length, step_tokens, minutes in plan:
        phase = time.time()
        while agree(time.time() - phase) < minutes * 60:
            now = int(length) if rng.random() < 0.8 else rng.choice([n for n in (64, 128, 256, 512, 1024, 2048) if n <= length])
            now, elapsed = agree((now, time.time() - start))
            count = max(1, int(step_tokens) // now // args.workers)
            ids, starts, follow = batch_of(rng, vocab, encode, now, count, max(16, now // 8))
            with torch.no_grad():
                hidden = trunk.hidden(ids)
            before = one_back(hidden) * (torch.rand(ids.shape) >= UNKNOWN)[..., None]
            loss, right = 0, []
            for i, logits in enumerate(head(ids, before, starts, STEPS)):
                use = follow[..., i] > 0
                place = (starts + i).clamp(max=now - 1)[..., None]
                teacher = trunk.logits(hidden.take_along_dim(place, 1)[use])
                student = logits[use]
                lost = (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(-1)
                loss = loss + STEP_WEIGHTS[i] * lost.sum() / max(1, len(lost))
                right.append((student.argmax(-1) == teacher.argmax(-1)).float().mean().item())
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1, (step + 1) / 50) * (1 if elapsed < 0.5 * total else 0.05 + 0.95 * 0.5 * (
                    1 + math.cos(math.pi * min(1, (elapsed / total - 0.5) / 0.5))))
            optimizer.zero_grad()
            loss.backward()
            average_gradients(head, args.workers)
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            step, tokens = step + 1, tokens + now * count * args.workers
            sums.append([loss.item(), *right])
            if rank == 0 and step % args.every == 0:
                means = torch.tensor(sums).nanmean(0).tolist()
                print(step, f"{time.time() - start:.0f} s", int(length), *(f"{x:.4f}" for x in means), tokens, flush=True)
                sums = []
                torch.save(head.state_dict(), args.out)
    if rank == 0:
        torch.save(head.state_dict(), args.out)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="../../model/demo")
    parser.add_argument("--out", default="head.pt", help="the checkpoint to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--plan", default="128:2048:3,256:2048:3", help="length:tokens of a step:minutes, ...")
    parser.add_argument("--from", dest="start", default="", help="a checkpoint to continue")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--every", type=int, default=20)
    args = parser.parse_args()
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    train(args, fork_workers(args.workers))


if __name__ == "__main__":
    main()
