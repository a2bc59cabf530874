#!/usr/bin/env python3
"""Writes random tiny models of each supported family, with the logits of Hugging Face transformers.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors
    venv/bin/python tests/data/make_model_fixtures.py          # rewrites tests/data/models/*

Each folder holds a checkpoint as transformers saves it, and expected.safetensors with
`tokens` [32] (whole numbers as F32) and `logits` [32, vocab], computed in float32 from the stored weights.
The sizes are odd on purpose: none is a multiple of a vector or of a panel.
"""
import json
import os
import shutil

import torch
from safetensors.torch import save_file
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "models")
N_TOKENS = 32
COMMON = dict(bos_token_id=1, eos_token_id=2, pad_token_id=None, max_position_embeddings=128)

# name, model class, config, stored dtype, max shard size, edit of the saved config.json
CASES = [
    ("llama2", LlamaForCausalLM,
     LlamaConfig(hidden_size=48, intermediate_size=100, num_hidden_layers=2, num_attention_heads=6,
                 num_key_value_heads=3, vocab_size=211, rms_norm_eps=1e-5, **COMMON),
     torch.float32, None, None),
    # original_max_position_embeddings 16 gives wavelengths inside the smooth band and on both sides of it
    ("llama31", LlamaForCausalLM,
     LlamaConfig(hidden_size=40, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=1, head_dim=20, vocab_size=203, tie_word_embeddings=True,
                 rope_parameters=dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0,
                                      high_freq_factor=4.0, original_max_position_embeddings=16), **COMMON),
     torch.bfloat16, None, None),
    # the older spelling with rope_theta and rope_scaling.type
    ("llama_linear_bias", LlamaForCausalLM,
     LlamaConfig(hidden_size=36, intermediate_size=60, num_hidden_layers=2, num_attention_heads=6,
                 num_key_value_heads=2, head_dim=6, vocab_size=197, attention_bias=True, mlp_bias=True,
                 rope_parameters=dict(rope_type="linear", rope_theta=20000.0, factor=2.0), **COMMON),
     torch.float16, None,
     dict(rope_parameters=None, rope_theta=20000.0, rope_scaling=dict(type="linear", factor=2.0))),
    ("mistral", MistralForCausalLM,
     MistralConfig(hidden_size=40, intermediate_size=90, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=12, vocab_size=223, sliding_window=8, **COMMON),
     torch.float32, "30KB", None),
    # the sliding window starts at layer 1
    ("qwen2", Qwen2ForCausalLM,
     Qwen2Config(hidden_size=32, intermediate_size=70, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=229, tie_word_embeddings=True, use_sliding_window=True,
                 sliding_window=6, max_window_layers=1, **COMMON),
     torch.float32, None, dict(rope_parameters=None, rope_theta=10000.0)),
    ("qwen3", Qwen3ForCausalLM,
     Qwen3Config(hidden_size=32, intermediate_size=58, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=14, vocab_size=241,
                 rope_parameters=dict(rope_type="default", rope_theta=1e6), **COMMON),
     torch.bfloat16, None, None),
]


def randomise(model):
    """Draws weights so large that attention is far from uniform, and a wrong term shows."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.3)
            elif p.dim() == 1:
                p.copy_(1 + 0.2 * torch.randn_like(p))
            else:
                gain = 1.7 if "q_proj" in name or "k_proj" in name else 1.0
                p.normal_(0, gain / p.shape[1] ** 0.5)


def main():
    for i, (name, model_class, config, dtype, shard, edit) in enumerate(CASES):
        torch.manual_seed(100 + i)
        folder = os.path.join(HERE, name)
        shutil.rmtree(folder, ignore_errors=True)
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        randomise(model)
        model = model.to(dtype)
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        if edit:
            path = os.path.join(folder, "config.json")
            with open(path) as f:
                saved = json.load(f)
            saved.update(edit)
            with open(path, "w") as f:
                json.dump({k: v for k, v in saved.items() if v is not None}, f, indent=2)
        tokens = torch.randint(0, config.vocab_size, (N_TOKENS,))
        # The model is reloaded, because `model.to(dtype)` has also rounded the RoPE frequencies.
        model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0]
        save_file({"tokens": tokens.float(), "logits": logits.contiguous()},
                  os.path.join(folder, "expected.safetensors"))
        for file in os.listdir(folder):
            os.chmod(os.path.join(folder, file), 0o644)
        print(name, "logits", tuple(logits.shape), "std", round(float(logits.std()), 3))


main()
