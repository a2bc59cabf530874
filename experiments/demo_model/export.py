"""A training checkpoint -> a Hugging Face folder in bf16: python export.py CHECKPOINT.pt FOLDER"""

import json
import os
import struct
import sys

import torch

import data
from model import Llama

# Llama 3's, without tools and dates.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")


def main(checkpoint, folder):
    vocab = data.Vocab()
    model = Llama(len(vocab))
    model.load_state_dict(torch.load(checkpoint))
    s = model.shape
    os.makedirs(folder, exist_ok=True)
    header, pieces, at = {}, [], 0
    for name, key in model.names.items():
        tensor = model.p[key].detach().to(torch.bfloat16).contiguous()
        raw = tensor.view(torch.uint16).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        pieces.append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(pieces))
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
    main(*sys.argv[1:])
