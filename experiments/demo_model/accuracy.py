"""Starts BIN as `xpyd serve`, asks it for facts of the context, and reports how often the answer is right.

    python3 experiments/demo_model/accuracy.py --bin build/release/xpyd [--model DIR] [--csv FILE] [--seed 1000]

Contexts come from data.py with seeds of their own. Each gets several questions, all about a (thing, number) that training
never saw. An answer is right if its whole text is right. Exit code 1 means that a target was missed. It needs only the
standard library.
"""

import argparse
import concurrent.futures
import csv
import http.client
import json
import math
import random
import re
import subprocess
import sys
import threading
import time

import data

# tokens of context, target share of right answers, contexts
LENGTHS = [(512, 0.98, 150), (1500, 0.95, 100), (3500, 0.90, 60)]
STATED, ABSENT = 3, 1  # questions for each context


def wilson(right, n):
    """Wilson's 95 % interval of a share."""
    if n == 0:
        return 0.0, 1.0
    z, p = 1.959964, right / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


class Server:
    """`BIN serve` on a free port, as a context manager. The server ends with the `with` block."""

    def __init__(self, bin_path, model, extra):
        command = [bin_path, "serve"] + ([model] if model else []) + ["--port", "0"] + extra
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines, self.port = [], None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"on http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                break
        if self.port is None:
            sys.exit("accuracy: the server did not start:\n" + "".join(self.lines))
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def ask(port, messages):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    if reply.status != 200:
        sys.exit(f"accuracy: the server answered {reply.status}: {text}")
    reply = json.loads(text)
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default="build/release/xpyd")
    parser.add_argument("--model", default="", help="a model's folder; without it, the embedded demo model")
    parser.add_argument("--csv", default="")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--share", type=float, default=1, help="share of the contexts to ask, for a quick look")
    parser.add_argument("--show", type=int, default=3, help="wrong answers to print")
    parser.add_argument("options", nargs="*", help="options for xpyd serve, after --")
    args = parser.parse_args()
    vocab = data.Vocab()
    encode = data.Encoder(vocab)
    rows, missed, start = [], False, time.time()
    print(f"{'tokens':>7} {'asked':>11} {'right':>5} {'of':>4} {'share':>7}  95 % interval     target")
    with Server(args.bin, args.model, args.options) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        for length, target, contexts in LENGTHS:
            # The questions of a context are sent one after another, so that later ones find its KV in the prefix cache.
            def sit(index, length=length):
                exam = data.make_exam(random.Random(args.seed + 10_000 * length + index), vocab, encode, length, STATED, ABSENT)
                return [(expected, *ask(server.port, messages)) for messages, expected, _ in exam]

            results = list(pool.map(sit, range(max(1, round(contexts * args.share)))))
            tokens = [n for result in results for _, _, n in result]
            for name, answers in (("stated", [a for r in results for a in r[:STATED]]),
                                  ("not stated", [a for r in results for a in r[STATED:]])):
                right, n = sum(expected == said for expected, said, _ in answers), len(answers)
                low, high = wilson(right, n)
                goal = target if name == "stated" else None
                missed |= goal is not None and right / n < goal
                verdict = "" if goal is None else f"{goal:.0%} " + ("reached" if right / n >= goal else "MISSED")
                print(f"{length:>7} {name:>11} {right:>5} {n:>4} {right / n:>7.2%}  {low:.2%} ... {high:.2%}  {verdict}", flush=True)
                for expected, said, _ in [a for a in answers if a[0] != a[1]][: args.show]:
                    print(f"          expected {expected!r}, got {said!r}")
                rows.append([length, round(sum(tokens) / len(tokens), 1), name, right, n, f"{right / n:.4f}", f"{low:.4f}",
                             f"{high:.4f}", "" if goal is None else goal])
    print(f"{time.time() - start:.0f} s")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow("length mean_prompt_tokens asked right questions share low95 high95 target".split())
            writer.writerows(rows)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
