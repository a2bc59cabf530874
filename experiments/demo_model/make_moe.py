"""Writes the demo model as a Mixtral folder: python3 make_moe.py FOLDER [--experts 8] [--used 2]

Each expert computes the dense MLP, with its inner columns in an order of its own ("sparse upcycling", arXiv 2212.05055,
before training). The router is random. So tokens go to different experts, and the answers stay those of the demo model.
It needs Python alone."""

import argparse
import json
import os
import random
import shutil
import struct

DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../model/demo")


def read_tensors(path):
    """Returns {name: (shape, bytes)} of bf16 tensors."""
    with open(path, "rb") as file:
        raw = file.read()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    return {name: (entry["shape"], raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
            for name, entry in json.loads(raw[8:start]).items() if name != "__metadata__"}


def write_tensors(path, tensors):
    header, at = {}, 0
    for name, (shape, raw) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(raw for _, raw in tensors.values()))


def bf16(value):
    return struct.pack("<f", value)[2:]


def rows_in_order(tensor, order):
    shape, raw = tensor
    width = 2 * shape[1]
    return shape, b"".join(raw[i * width : (i + 1) * width] for i in order)


def columns_in_order(tensor, order):
    shape, raw = tensor
    width = 2 * shape[1]
    return shape, b"".join(raw[at + 2 * i : at + 2 * i + 2] for at in range(0, len(raw), width) for i in order)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--used", type=int, default=2)
    options = parser.parse_args()
    os.makedirs(options.folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(DEMO, name), options.folder)
    with open(os.path.join(DEMO, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    del config["num_nextn_predict_layers"]
    config.update(architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=options.experts,
                  num_experts_per_tok=options.used)
    with open(os.path.join(options.folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)

    draw, dense, sparse = random.Random(1), read_tensors(os.path.join(DEMO, "model.safetensors")), {}
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    for name, tensor in dense.items():
        if ".mlp." not in name and not name.startswith(f"model.layers.{layers}."):  # the last one predicts
            sparse[name] = tensor
    for layer in range(layers):
        mlp, block = f"model.layers.{layer}.mlp.", f"model.layers.{layer}.block_sparse_moe."
        scores = b"".join(bf16(draw.gauss(0, 0.2)) for _ in range(options.experts * hidden))
        sparse[block + "gate.weight"] = ([options.experts, hidden], scores)
        for expert in range(options.experts):
            at, order = f"{block}experts.{expert}.", draw.sample(range(inner), inner)
            sparse[at + "w1.weight"] = rows_in_order(dense[mlp + "gate_proj.weight"], order)
            sparse[at + "w3.weight"] = rows_in_order(dense[mlp + "up_proj.weight"], order)
            sparse[at + "w2.weight"] = columns_in_order(dense[mlp + "down_proj.weight"], order)
    write_tensors(os.path.join(options.folder, "model.safetensors"), sparse)


main()
