"""Writes a training checkpoint as a Hugging Face folder in bf16: python export.py CHECKPOINT.pt FOLDER

With --head, the checkpoint is one of train_mtp.py. Its weights are appended to those in FOLDER, which do not change."""

import json
import os
import struct
import sys

import torch

import data
from model import Head, Llama

# The template of Llama 3, without tools and dates.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")


def read_tensors(folder):
    """Returns {name: (entry of the header, bytes)}, in the order of the bytes in the file."""
    with open(os.path.join(folder, "model.safetensors"), "rb") as file:
        raw = file.read()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    return {name: (entry, raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])}


def write_tensors(folder, tensors):
    header, at = {}, 0
    for name, (entry, raw) in tensors.items():
        header[name] = {**entry, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(raw for _, raw in tensors.values()))


def rounded(layers):
    """The weights of a part of the model, rounded to bf16, in the form of read_tensors()."""
    tensors = {name: layers.p[key].detach().to(torch.bfloat16).contiguous() for name, key in layers.names.items()}
    return {name: ({"dtype": "BF16", "shape": list(t.shape)}, t.view(torch.uint16).numpy().tobytes())
            for name, t in tensors.items()}


def append_head(checkpoint, folder):
    head = Head(Llama(len(data.Vocab())))
    head.load_state_dict(torch.load(checkpoint))
    trunk = {name: tensor for name, tensor in read_tensors(folder).items() if not name.startswith(head.at)}
    write_tensors(folder, {**trunk, **rounded(head)})
    assert all(read_tensors(folder)[name] == tensor for name, tensor in trunk.items()), "the trunk has changed"
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    write_json(path, {**config, "num_nextn_predict_layers": 1})


def main(checkpoint, folder):
    vocab = data.Vocab()
    model = Llama(len(vocab))
    model.load_state_dict(torch.load(checkpoint))
    s = model.shape
    os.makedirs(folder, exist_ok=True)
    write_tensors(folder, rounded(model))
    write_json(os.path.join(folder, "config.json"), {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": s["hidden"], "intermediate_size": s["intermediate"], "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"], "num_key_value_heads": s["kv_heads"], "head_dim": s["head_dim"],
        "max_position_embeddings": s["context"], "rms_norm_eps": s["eps"], "rope_theta": s["theta"],
        "vocab_size": s["vocab"], "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": vocab.bos, "eos_token_id": [vocab.eot, vocab.eos], "torch_dtype": "bfloat16"})
    write_json(os.path.join(folder, "tokenizer.json"), vocab.tokenizer_json())
    write_json(os.path.join(folder, "tokenizer_config.json"), {
        "bos_token": data.SPECIALS[0], "eos_token": data.SPECIALS[4], "model_max_length": s["context"],
        "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE})
    print(folder, sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder)), "bytes")


if __name__ == "__main__":
    if sys.argv[1] == "--head":
        append_head(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
