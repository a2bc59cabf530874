"""Subscribes to the KV cache events of `BIN serve` as a router of vLLM's does, with pyzmq and msgspec alone, and predicts
the server's prefix hits before it asks: python kv_events_client.py BIN [OPERATIONS]

Every check prints a line. The exit code is 0 only if all held.
"""

import http.client
import json
import random
import re
import socket
import subprocess
import sys
import threading
from typing import Optional, Union

import msgspec
import zmq

BLOCK = 16
END = (-1).to_bytes(8, "big", signed=True)
passed, failed = [], []


# The schema as vLLM's own subscribers declare it: arrays, in which the first element of an event is its name.
class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Union["BlockStored", "BlockRemoved", "AllBlocksCleared"]]
    data_parallel_rank: Optional[int] = None


class Event(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: Optional[int]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str]
    lora_name: Optional[str]
    extra_keys: Optional[list] = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: Optional[str]


class AllBlocksCleared(Event):
    pass


def check(what: str, held: bool, more: object = "") -> None:
    print(("ok    " if held else "FAIL  ") + what + ("" if held else f": {more}"), flush=True)
    (passed if held else failed).append(what)


def free_ports(n: int) -> int:
    """Returns the first of n consecutive ports on which nothing listens."""
    while True:
        first = random.randrange(20000, 32000)
        try:
            for port in range(first, first + n):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
            return first
        except OSError:
            pass


class Server:
    def __init__(self, binary: str, *options: str):
        self.process = subprocess.Popen([binary, "serve", "--port", "0", *options],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
                break
        else:
            sys.exit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.connection = http.client.HTTPConnection("127.0.0.1", int(found.group(1)))

    def post(self, path: str, body: dict) -> dict:
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            sys.exit(f"{path}: {answer.status} {text}")
        return json.loads(text or "{}")

    def ask(self, *prompts: list[int]) -> int:
        """Returns the number of prompt tokens that the server did not compute."""
        usage = self.post("/v1/completions", {"prompt": prompts, "max_tokens": 1, "ignore_eos": True})["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


class Subscriber:
    """Keeps blocks by (hash of the block before, tokens). One message in `drop` is ignored on purpose."""

    def __init__(self, port: int, replay_port: int, drop: int = 0):
        context = zmq.Context.instance()
        self.events, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.events.setsockopt_string(zmq.SUBSCRIBE, "")
        self.events.set_hwm(0)
        self.replay.set_hwm(0)
        self.events.connect(f"tcp://127.0.0.1:{port}")
        self.replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self.drop = drop
        self.decoder = msgspec.msgpack.Decoder(Batch)
        self.next, self.messages, self.dropped, self.replayed, self.cleared = 0, 0, 0, 0, 0
        self.ranks, self.known, self.names = set(), {}, {}
        self.catch_up()

    def catch_up(self) -> None:
        self.replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            if not self.replay.poll(20000):
                sys.exit("the replay socket does not answer")
            empty, sequence, payload = self.replay.recv_multipart()
            if sequence == END:
                return
            self.replayed += 1
            self.take(int.from_bytes(sequence, "big"), payload)

    def listen(self, quiet_ms: int) -> None:
        """Reads events until none has come for quiet_ms."""
        while self.events.poll(quiet_ms):
            topic, sequence, payload = self.events.recv_multipart()
            assert topic == b"", topic
            self.messages += 1
            if self.drop and random.randrange(self.drop) == 0:
                self.dropped += 1
                continue
            number = int.from_bytes(sequence, "big")
            if number > self.next:
                self.catch_up()
            if number == self.next:
                self.take(number, payload)

    def take(self, number: int, payload: bytes) -> None:
        assert number == self.next, (number, self.next)
        self.next += 1
        batch = self.decoder.decode(payload)
        self.ranks.add(batch.data_parallel_rank)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.cleared += 1
                self.known.clear(), self.names.clear()
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.known[self.names.pop(name)]
            else:
                assert event.medium == "GPU" and event.block_size == BLOCK, event
                assert len(event.token_ids) == BLOCK * len(event.block_hashes), event
                before = event.parent_block_hash
                for i, name in enumerate(event.block_hashes):
                    block = (before, tuple(event.token_ids[BLOCK * i:BLOCK * (i + 1)]))
                    assert block not in self.known and name not in self.names, event
                    self.known[block], self.names[name] = name, block
                    before = name

    def finds(self, prompt: list[int]) -> int:
        """Returns the number of its tokens that are cached. The last token is always computed."""
        before, at = None, 0
        while at + BLOCK < len(prompt) and (name := self.known.get((before, tuple(prompt[at:at + BLOCK])))) is not None:
            before, at = name, at + BLOCK
        return at


def draw_prompt() -> list[int]:
    """Draws from few prefixes that diverge often."""
    prompt = []
    while len(prompt) < random.randrange(1, 160):
        prompt += [10 + random.randrange(4)] * random.choice((3, BLOCK, 2 * BLOCK))
    return prompt


def one_instance(binary: str, operations: int) -> None:
    port = free_ports(2)
    # The pool has 64 blocks, so stored blocks are soon removed.
    server = Server(binary, "--topology", "1C", "--kv-bytes", "4MiB", "--kv-events", f"tcp://127.0.0.1:{port}",
                    "--kv-events-replay", f"tcp://127.0.0.1:{port + 1}")
    subscriber = Subscriber(port, port + 1, drop=20)
    done, looked, hits, wrong = 0, 0, 0, []
    while done < operations:
        if random.randrange(500) == 0:
            server.post("/reset_prefix_cache", {})
            done += 1
        server.ask(*(draw_prompt() for _ in range(8)))
        done += 8
        subscriber.listen(0)
        if random.randrange(4) == 0:
            subscriber.listen(60)
            subscriber.catch_up()  # the last message may be among those that were dropped
            prompt = draw_prompt()
            expected, found = subscriber.finds(prompt), server.ask(prompt)
            done, looked, hits = done + 1, looked + 1, hits + (found > 0)
            if expected != found:
                wrong.append((done, expected, found))
    check(f"{done} operations, {looked} looks: what was expected in the cache was there, and no more",
          not wrong and looked > operations / 50 and looked / 10 < hits < looked, (wrong[:5], hits, looked))
    check(f"of {subscriber.messages} messages {subscriber.dropped} were dropped, and {subscriber.replayed} came again",
          subscriber.dropped > subscriber.messages / 40 and subscriber.replayed >= subscriber.dropped)
    check("one rank, number 0, which began with nothing", subscriber.ranks == {0} and subscriber.cleared == 1,
          (subscriber.ranks, subscriber.cleared))
    subscriber.listen(60), subscriber.catch_up()
    late = Subscriber(port, port + 1)
    check("who comes late and asks from 0 knows the same", late.known == subscriber.known and late.known)
    server.end()


def processes(binary: str) -> None:
    port = free_ports(4)
    server = Server(binary, "--topology", "2C", "--processes", "--kv-bytes", "4MiB", "--placement", "prefix_aware",
                    "--kv-events", f"tcp://127.0.0.1:{port}", "--kv-events-replay", f"tcp://127.0.0.1:{port + 2}",
                    "--transport", "tcp")
    subscribers = [Subscriber(port + i, port + 2 + i) for i in range(2)]
    prompts = [[20 + i] * 100 for i in range(6)]
    for prompt in prompts:
        server.ask(prompt)
    known = []
    for subscriber in subscribers:
        subscriber.listen(500)
        subscriber.catch_up()
        known.append([subscriber.finds(prompt) for prompt in prompts])
    check("worker processes tell at ports of their own, as ranks 0 and 1",
          [s.ranks for s in subscribers] == [{0}, {1}], [s.ranks for s in subscribers])
    check("of each prompt somebody has all but the last block", all(max(a, b) == 96 for a, b in zip(*known)), known)
    server.end()


if __name__ == "__main__":
    random.seed(1)
    one_instance(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
    processes(sys.argv[1])
    print(f"{len(passed)} passed, {len(failed)} failed")
    sys.exit(bool(failed))
