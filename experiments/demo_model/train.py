"""Trains the demo model. `python train.py --out DIR` is the run that README.md reports."""

import argparse
import csv
import math
import os
import random
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import data
from model import Llama


def batch_of(rng, vocab, encode, length, count, odd):
    ids = torch.full((count, length), vocab.eos, dtype=torch.long)
    weights = torch.zeros(count, length)
    value = torch.zeros(count, length, dtype=torch.long)  # 1: a value that is stated, 2: one that is not
    for row in range(count):
        doc = data.make_document(rng, vocab, encode, length, odd)
        while not any(doc.weights[1:length]):  # the facts left no room for a question
            doc = data.make_document(rng, vocab, encode, length, odd)
        n = min(len(doc.ids), length)
        ids[row, :n] = torch.tensor(doc.ids[:n])
        weights[row, :n] = torch.tensor(doc.weights[:n])
        for at, stated in doc.lookups:
            if at < n:
                value[row, at] = 1 if stated else 2
    return ids[:, :-1], ids[:, 1:], weights[:, 1:], value[:, 1:]


@torch.no_grad()
def examine(model, vocab, encode, seed, length, count):
    """Shares of right answers at `length` tokens: (for stated facts, for facts that are not stated)."""
    rng = random.Random(seed)
    right = [0, 0]
    for i in range(count):
        stated = i % 4 != 0
        _, expected, ids = data.make_exam(rng, vocab, encode, length, int(stated), int(not stated))[0]
        tail = encode(expected)
        given = torch.tensor([ids + tail])
        wanted = torch.zeros(given.shape, dtype=torch.bool)
        wanted[0, len(ids) - 1 : -1] = True
        logits = model(given, wanted)
        right[not stated] += bool((logits.argmax(-1) == torch.tensor(tail)).all())
    absent = (count + 3) // 4
    return right[0] / (count - absent), right[1] / absent


def fork_workers(workers):
    """Forks into `workers` processes of one thread each. Returns the rank of this process."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(29000 + os.getpid() % 1000))
    rank = 0
    for child in range(1, workers):
        if rank == 0 and os.fork() == 0:
            rank = child
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=workers)
    return rank


def average_gradients(model, workers):
    """Averages the gradients of all workers, once a step. Threads would have to synchronise at every operation."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p) / workers)
        at += p.numel()


def agree(value):
    """Returns rank 0's value in every process, for values that depend on the clock or on a draw."""
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--plan", default="64:4096:3,128:4096:3,256:4096:5,512:4096:8,1024:4096:10,2048:4096:10,3600:3600:15",
                        help="length:tokens of a step:minutes, ...")
    parser.add_argument("--odd", type=float, default=0.03, help="share of documents without facts")
    parser.add_argument("--from", dest="start", default="", help="a checkpoint to continue; give it another --seed")
    parser.add_argument("--plain-start", action="store_true", help="all weights random")
    parser.add_argument("--every", type=int, default=20)
    args = parser.parse_args()
    train(args, fork_workers(args.workers))


def train(args, rank):
    os.makedirs(args.out, exist_ok=True)
    vocab = data.Vocab()
    encode = data.Encoder(vocab)
    model = Llama(len(vocab), args.seed)
    if not args.plain_start:
        model.begin_with_recall(vocab.bos, vocab.id[" not"])
    if args.start:
        model.load_state_dict(torch.load(args.start))
    if rank == 0:
        print(sum(p.numel() for p in model.parameters()), "parameters", flush=True)
    rng = random.Random(args.seed * 1000 + rank)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.98), eps=1e-9)
    plan = [tuple(float(x) for x in part.split(":")) for part in args.plan.split(",")]
    curve = os.path.join(args.out, "loss.csv")
    start, step, tokens, before = time.time(), 0, 0, 0.0
    if args.start and os.path.exists(curve):  # the curve is continued
        with open(curve, encoding="utf-8") as file:
            last = list(csv.DictReader(file))[-1]
        step, tokens, before = int(last["step"]), int(last["tokens"]), float(last["seconds"])
    dist.barrier()
    log = csv.writer(open(curve if rank == 0 else os.devnull, "a", buffering=1), lineterminator="\n")
    if step == 0:
        log.writerow("step tokens seconds length loss value_loss value_right not_stated_right".split())
    first = step
    total = sum(p[2] for p in plan) * 60
    sums = [0.0] * 8
    for length, step_tokens, minutes in plan:
        length, phase = int(length), time.time()
        while agree(time.time() - phase) < minutes * 60:
            # A fifth of the steps draws a length up to the phase's own, so that the model does not forget short ones.
            now = length if rng.random() < 0.8 else rng.choice([n for n in (64, 128, 256, 512, 1024, 2048) if n <= length])
            now, elapsed = agree((now, time.time() - start))
            count = max(1, int(step_tokens) // now // args.workers)
            ids, targets, weights, value = batch_of(rng, vocab, encode, now, count, args.odd)
            wanted = weights > 0
            logits = model(ids, wanted)
            losses = F.cross_entropy(logits, targets[wanted], reduction="none")
            loss = (losses * weights[wanted]).sum() / weights[wanted].sum()
            lr = args.lr * min(1, (step - first + 1) / 50) * (1 if elapsed < 0.5 * total else 0.05 + 0.95 * 0.5 * (
                1 + math.cos(math.pi * min(1, (elapsed / total - 0.5) / 0.5))))
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, args.workers)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            tokens += now * count * args.workers
            with torch.no_grad():
                kind, right = value[wanted], logits.argmax(-1) == targets[wanted]
                of_values = kind == 1
                sums[0] += loss.item()
                sums[1] += losses[of_values].sum().item()
                sums[2] += of_values.sum().item()
                sums[3] += (right & of_values).sum().item()
                sums[4] += (kind == 2).sum().item()
                sums[5] += (right & (kind == 2)).sum().item()
                sums[6] += 1
            if step % args.every == 0 and rank == 0:
                row = [step, round(before + elapsed, 1), length, sums[0] / sums[6], sums[1] / max(1, sums[2]),
                       sums[3] / max(1, sums[2]), sums[5] / max(1, sums[4])]
                log.writerow([step, tokens] + row[1:3] + [f"{x:.4f}" for x in row[3:]])
                print(*row[:3], *(f"{x:.4f}" for x in row[3:]), f"{tokens / (before + elapsed):.0f} tok/s lr {lr:.1e}", flush=True)
                sums = [0.0] * 8
            if step % 200 == 0 and rank == 0:
                torch.save(model.state_dict(), os.path.join(args.out, "last.pt"))
                if length >= 256:
                    result = {n: examine(model, vocab, encode, 77, n, 24) for n in (512, 1500, 3500) if n <= 2 * length}
                    print("   exam", result, flush=True)
        if rank == 0:
            torch.save(model.state_dict(), os.path.join(args.out, f"phase{length}.pt"))
            torch.save(model.state_dict(), os.path.join(args.out, "last.pt"))


if __name__ == "__main__":
    main()
