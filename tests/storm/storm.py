#!/usr/bin/env python3
"""Storms of requests against servers with little memory: no request hangs, no answer differs, and nothing is left behind.

storm.py BINARY [--minutes N] [--seed N] [--only N]

First a colocated server answers every request alone. Then each storm sends 90 greedy requests, 40 at once, to a server whose
options are drawn from OPTIONS. Prompts have 1 to 330 tokens, half of them on four shared prefixes. Outputs have 4 to 100
tokens, and there are three priorities and two salts. A few clients leave in the middle of their stream. If the instances are
processes, one of them may be killed. Every answer must equal the one that was given alone. A server hangs if requests are
open and none of its counters of tokens, prompt tokens and preemptions moves for 6 s while it has the time to compute. After
a storm no sequence runs or waits, no block is active, and no more descriptors are open than before.

The last line counts storms: `N passed, N failed, N skipped`. A storm is skipped if the server refuses its options (exit code 2).
"""
import argparse
import http.client
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

OPTIONS = {
    "--topology": ["1P1D", "3P1D", "2P1D", "1P2D", "2P2D", "1C", "2C1P1D"],
    "--allocator": ["paged", "paged", "vattention"],
    "--prefix-cache": ["blocks", "blocks", "radix", "off"],
    "--block-tokens": ["16", "16", "4", "64"],
    "--kv-bytes": ["2400KiB", "4MiB"],
    "--host-kv-bytes": ["3MiB", "1MiB", "8MiB", "0"],
    "--disk-kv-bytes": ["", "", "", "16MiB"],
    "--kv-copy-gbps": ["0", "0", "0.02"],
    "--transport": ["local", "local", "handoff", "tcp", "shm"],
    "--processes": ["", "", "", "on"],
    "--disagg": ["prefill_first", "prefill_first", "decode_first", "conditional_threshold", "conditional_tbt"],
    "--slo-tbt": ["", "", "0.05"],
    "--kv-transfer": ["push", "push", "pull"],
    "--reservation": ["off", "off", "escrow"],
    "--kv-fetch": ["never", "always", "cost"],
    "--placement": ["least_loaded", "prefix_aware", "mooncake"],
    "--chunk-tokens": ["512", "64", "16", "7"],
    "--max-batch": ["64", "8", "2"],
    "--speculate": ["off", "off", "ngram"],
    "--stream-kv": ["layer", "chunk", "request"],
}
COMMON = ["--threads", "1", "--max-model-len", "450"]
STILL_S = 6


def requests_of(seed):
    draw = random.Random(seed)
    word = lambda: draw.choice("the key of box is amber owner house Grace drink table tea city train Oslo what who".split())
    prefixes = [" ".join(word() for _ in range(60)) for _ in range(4)]
    made = []
    for i in range(90):
        own = " ".join(word() for _ in range(draw.randint(1, 60)))
        made.append({
            "prompt": (draw.choice(prefixes) + " " + own if i % 2 else own) + f" {i}",
            "max_tokens": draw.randint(4, 100),
            "temperature": 0,
            "ignore_eos": draw.random() < 0.8,
            "priority": draw.randint(0, 2),
            "cache_salt": draw.choice(["a", "b"]),
        })
    return made


class Server:
    def __init__(self, binary, options, folder):
        self.log = open(os.path.join(folder, "server.log"), "wb")
        os.makedirs(os.path.join(folder, "disk"), exist_ok=True)
        self.process = subprocess.Popen([binary, "serve", "--port", "0", *options], stdout=self.log, stderr=self.log,
                                        cwd=folder, start_new_session=True)
        self.port = None

    def text(self):
        self.log.flush()
        with open(self.log.name, errors="replace") as file:
            return file.read()

    def ready(self):
        """Returns True once the server serves, and False if it has refused its options."""
        until = time.time() + 120
        while time.time() < until:
            if self.process.poll() is not None:
                if self.process.returncode == 2:
                    return False
                raise Trouble(f"it ended with {self.process.returncode} at its start: " + self.text()[-300:])
            found = re.search(r" on http://[^:]+:(\d+)", self.text())
            if found:
                self.port = int(found.group(1))
                try:
                    if self.get("/health")[0] == 200:
                        return True
                except OSError:
                    pass
            time.sleep(0.1)
        raise Trouble("it was not ready after 120 s")

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def metrics(self, *names):
        """Returns the sum of each of these metrics over all instances."""
        text = self.get("/metrics")[1]
        return [sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)) for name in names]

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def settled_descriptors(self):
        """Returns their number once it has not changed for a second. Instances may still connect when the server is ready."""
        last, since = self.descriptors(), time.time()
        until = time.time() + 20
        while time.time() - since < 1 and time.time() < until:
            time.sleep(0.1)
            if (now := self.descriptors()) != last:
                last, since = now, time.time()
        return last

    def workers(self):
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.log.close()


class Trouble(Exception):
    pass


def ask(port, request, leave_after=None):
    """Returns (text, reason) of a stream, or None if the client leaves after `leave_after` events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", "/v1/completions", json.dumps({**request, "stream": True}),
                           {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise Trouble(f"status {reply.status}: {reply.read().decode()[:200]}")
        text, reason, events = "", None, 0
        for line in reply:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            body = json.loads(line[6:])
            if "error" in body:
                raise Trouble(f"an error in its stream: {body['error']}")
            for choice in body["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
            events += 1
            if leave_after is not None and events >= leave_after:
                return None
        return text, reason
    finally:
        connection.close()


def ask_again(port, request, leave_after):
    """Repeats refused requests. If the only worker of a role was killed, requests are refused until it is back."""
    until = time.time() + 30
    while True:
        try:
            return ask(port, request, leave_after)
        except Trouble as trouble:
            if "there is no instance" not in str(trouble) or time.time() > until:
                raise
        time.sleep(0.2)


def storm(server, wanted, alone, draw, kill):
    before = server.settled_descriptors()
    waiting = queue.Queue()
    for i, request in enumerate(wanted):
        waiting.put((i, request, draw.randint(1, 10) if draw.random() < 0.08 else None))
    wrong, open_now, lock = [], [0], threading.Lock()

    def client():
        while True:
            try:
                i, request, leave_after = waiting.get_nowait()
            except queue.Empty:
                return
            with lock:
                open_now[0] += 1
            try:
                got = ask_again(server.port, request, leave_after) if kill else ask(server.port, request, leave_after)
                if got is not None and got != alone[i]:
                    wrong.append(f"request {i} is {got}, alone it was {alone[i]}")
            except (Trouble, OSError, http.client.HTTPException) as error:
                if not server_is_stopped.is_set():
                    wrong.append(f"request {i}: {error!r}")
            with lock:
                open_now[0] -= 1

    server_is_stopped = threading.Event()
    clients = [threading.Thread(target=client, daemon=True) for _ in range(40)]
    for one in clients:
        one.start()
    last, since, killed = None, time.time(), False
    while any(one.is_alive() for one in clients):
        time.sleep(0.2)
        if server.process.poll() is not None:
            server_is_stopped.set()
            raise Trouble(f"the server ended with {server.process.returncode}: " + server.text()[-600:])
        try:
            now = server.metrics("vllm:generation_tokens_total", "vllm:engine_prompt_tokens_total", "vllm:num_preemptions_total")
        except OSError as error:
            now = None
            if time.time() - since > STILL_S:
                server_is_stopped.set()
                raise Trouble(f"/metrics does not answer: {error!r}")
        if now != last:
            last, since = now, time.time()
        elif time.time() - since > STILL_S:
            state = [line for line in server.get("/metrics")[1].split("\n")
                     if re.match(r"vllm:(num_requests|kv_blocks)\S* \S+", line) and not line.endswith(" 0")]
            server_is_stopped.set()
            raise Trouble(f"{open_now[0]} requests are open, and nothing moved for {STILL_S} s:\n  " + "\n  ".join(state))
        if kill and not killed and last and last[0] > 300:
            killed = True
            workers = server.workers()
            if workers:
                os.kill(draw.choice(workers), signal.SIGKILL)
    if wrong:
        raise Trouble(f"{len(wrong)} of {len(wanted)} differ: " + "; ".join(wrong[:3]))
    until = time.time() + 15
    while True:
        left = server.metrics("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_remote_prefilling",
                              "vllm:num_requests_sending", r'vllm:kv_blocks\{[^}]*state="(?:active|in_transfer)"[^}]*\}')
        more = server.descriptors() - before
        if not any(left) and more <= 8:  # (files of disk and transport open at first use)
            return
        if time.time() > until:
            raise Trouble(f"15 s after the last answer: running, waiting, coming, leaving, blocks held are {left}, and {more} descriptors more are open")
        time.sleep(0.3)


def drawn(draw):
    words = []
    for name, values in OPTIONS.items():
        value = draw.choice(values)
        if name == "--processes":
            words += [name] if value else []
        elif value:
            words += [name, value]
    at = dict(zip(words, words[1:]))
    if at.get("--transport") == "handoff" and at["--allocator"] == "vattention":  # it hands over tables of blocks
        words[words.index("vattention")] = "paged"
    if "--disk-kv-bytes" in at:
        words += ["--disk-kv-dir", "disk"]
    return words


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, default=0, help="this storm alone")
    options = parser.parse_args()
    binary = os.path.abspath(options.binary)
    wanted = requests_of(1)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(binary, ["--topology", "1C", "--threads", "1", "--max-model-len", "450"], folder)
        server.ready()
        alone = [ask(server.port, request) for request in wanted]
        server.stop()
    began, passed, failed, skipped = time.time(), 0, 0, 0
    number = options.only or options.seed
    while (time.time() - began < 60 * options.minutes) and not (options.only and passed + failed + skipped):
        draw = random.Random(number)
        words = [*drawn(draw), *COMMON]
        with tempfile.TemporaryDirectory() as folder:
            server = Server(binary, words, folder)
            try:
                if server.ready():
                    storm(server, wanted, alone, draw, kill="--processes" in words and draw.random() < 0.5)
                    passed += 1
                else:
                    skipped += 1
                    if options.only:
                        print(server.text()[-300:])
            except Trouble as trouble:
                failed += 1
                print(f"storm {number}: {' '.join(words)}\n  {trouble}", flush=True)
            finally:
                server.stop()
        number += 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
