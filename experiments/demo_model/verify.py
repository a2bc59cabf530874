"""Compares the server with PyTorch: equal prompt ids, and equal greedy text, both in f32 from the same bf16 weights.

    python experiments/demo_model/verify.py --bin build/release/xpyd --folder model/demo
"""

import argparse
import http.client
import json
import os
import random
import sys

import torch

import data
from accuracy import Server, ask
from export import read_tensors
from model import Head, Llama


@torch.no_grad()
def fill(layers, folder):
    tensors = read_tensors(folder)
    for name in layers.names:
        entry, raw = tensors[name]
        layers.w(name).copy_(torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).reshape(entry["shape"]).float())
    return layers


def load(folder):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    return fill(Llama(config["vocab_size"], hidden=config["hidden_size"], layers=config["num_hidden_layers"],
                      heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"],
                      head_dim=config["head_dim"], intermediate=config["intermediate_size"], theta=config["rope_theta"],
                      eps=config["rms_norm_eps"], context=config["max_position_embeddings"]), folder)


def load_head(trunk, folder):
    return fill(Head(trunk), folder)


@torch.no_grad()
def greedy(model, vocab, ids, limit=24):
    ids, said = list(ids), []
    for _ in range(limit):
        wanted = torch.zeros(1, len(ids), dtype=torch.bool)
        wanted[0, -1] = True
        token = int(model(torch.tensor([ids]), wanted).argmax())
        if token in (vocab.eot, vocab.eos):
            break
        ids.append(token)
        said.append(token)
    return "".join(vocab.texts[i] for i in said)


def tokenize(port, text):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/tokenize", json.dumps({"prompt": text}), {"Content-Type": "application/json"})
    reply = json.loads(connection.getresponse().read())
    connection.close()
    return reply["tokens"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default="build/release/xpyd")
    parser.add_argument("--folder", default="model/demo")
    parser.add_argument("--seed", type=int, default=5000)
    args = parser.parse_args()
    torch.set_num_threads(2)
    vocab = data.Vocab()
    encode = data.Encoder(vocab)
    model = load(args.folder)
    rng = random.Random(args.seed)
    prompts = [p[0::2] for n in (40, 60, 100, 150, 300, 512) for _ in range(5) for p in data.make_exam(rng, vocab, encode, n, 1, 1)]
    for text in ("Hello", "What is this", "The key of box 999 is foobar. What is the key of box 999?", "key", "17 boxes of amber"):
        doc = data.Document(vocab, encode)
        doc.header("user")
        doc.add(encode(text) + [vocab.eot])
        doc.header("assistant")
        prompts.append(([{"role": "user", "content": text}], doc.ids))
    differ = 0
    with Server(args.bin, args.folder, []) as server:
        for messages, ids in prompts:
            said, n_tokens = ask(server.port, messages)
            expected = greedy(model, vocab, ids)
            texts = [m["content"] for m in messages]
            same_ids = all(tokenize(server.port, t) == [vocab.bos] + encode(t) for t in texts) and n_tokens == len(ids)
            if said != expected or not same_ids:
                differ += 1
                print(f"{messages[-1]['content'][-60:]!r}: PyTorch {expected!r}, server {said!r}, same ids: {same_ids}")
    print(f"{len(prompts) - differ} of {len(prompts)} prompts: the same ids and the same text")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
