"""A Llama in PyTorch, with the parameter names of Hugging Face, and how its training begins."""

import math

import torch
import torch.nn.functional as F

SHAPE = dict(hidden=192, layers=4, heads=4, kv_heads=2, head_dim=64, intermediate=256, theta=1e8, eps=1e-5, context=4096)
OFFSETS = (1, 2, 3, 4)  # of the first layer's heads


class Llama(torch.nn.Module):
    def __init__(self, vocab, seed=1, **shape):
        super().__init__()
        self.shape = s = {**SHAPE, **shape, "vocab": vocab}
        h, d = s["hidden"], s["head_dim"]
        a, b, i = s["heads"] * d, s["kv_heads"] * d, s["intermediate"]
        self.p = torch.nn.ParameterDict()
        self.names = {}
        generator = torch.Generator().manual_seed(seed)

        def matrix(name, rows, columns, scale=1.0):
            self.add(name, torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns))

        self.add("model.embed_tokens.weight", torch.randn(vocab, h, generator=generator))
        for layer in range(s["layers"]):
            at = f"model.layers.{layer}."
            matrix(at + "self_attn.q_proj.weight", a, h)
            matrix(at + "self_attn.k_proj.weight", b, h)
            matrix(at + "self_attn.v_proj.weight", b, h)
            matrix(at + "self_attn.o_proj.weight", h, a, 0.5)
            matrix(at + "mlp.gate_proj.weight", i, h)
            matrix(at + "mlp.up_proj.weight", i, h)
            matrix(at + "mlp.down_proj.weight", h, i, 0.25)
            self.add(at + "input_layernorm.weight", torch.ones(h))
            self.add(at + "post_attention_layernorm.weight", torch.ones(h))
        self.add("model.norm.weight", torch.full((h,), 0.1))
        half = d // 2
        self.freqs = s["theta"] ** (-torch.arange(half, dtype=torch.float64) * 2 / d)
        angles = torch.outer(torch.arange(s["context"], dtype=torch.float64), self.freqs)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def add(self, name, tensor):
        key = name.replace(".", "/")
        self.names[name] = key
        self.p[key] = torch.nn.Parameter(tensor)

    def w(self, name):
        return self.p[name.replace(".", "/")]

    @torch.no_grad()
    def begin_with_recall(self, bos, no, sharpness=6.0, sink=4.5, seed=2):
        """Puts the idea of an induction head into the first two layers before training, which is then free to change all
        of it; without it the same training needs several times the tokens. The residual stream's dimensions are
        0: a constant, 1: "this is the first token", 2...63: the token, and four slots of 32 for the tokens 1...4 back.

        Layer 0, head n: attends n + 1 back (q and k are made of the constant, and RoPE aligns them at that distance),
        and copies a projection of the token there into slot n.
        Layer 1: at "... box 17 is" the slots 0 and 1 hold "17" and "box"; at the value of a fact, the slots 1 and 2 hold its
        number and thing. q reads the former and k the latter through the same random matrices, so they match where both
        words do. The value's token is copied. The first token's key lies between a half and a whole match: where no fact
        matches it is attended to, and its value begins as the embedding of " not"."""
        s, g = self.shape, torch.Generator().manual_seed(seed)
        d, h, half, slot = s["head_dim"], s["hidden"], s["head_dim"] // 2, 32
        assert h == 64 + 4 * slot and s["heads"] == 4 and s["kv_heads"] == 2 and d == 64
        orthogonal = lambda n, m: torch.linalg.qr(torch.randn(m, n, generator=g))[0].T  # n rows of m
        embedding = self.w("model.embed_tokens.weight")
        embedding[:, 64:] *= 0.02
        embedding[:, 0], embedding[:, 1] = 4, 0
        embedding[bos] = embedding[no]
        embedding[bos, 1] = 6
        small = lambda name: self.w(name).mul_(0.1)
        at = "model.layers.0.self_attn."
        q, k, v, o = (small(at + f"{m}_proj.weight") for m in "qkvo")
        used, seen = 12, 4 / math.sqrt((62 + 16) / h)  # frequencies that find a distance; the constant after the norm
        size = math.sqrt(10 * math.sqrt(d)) / seen
        projection = orthogonal(slot, 62)
        for head in range(2):
            k[head * d : head * d + used, 0] = size
            v[head * d : head * d + slot, 2:64] = projection
        for head in range(4):
            turn = self.freqs[:used].float() * OFFSETS[head]
            q[head * d : head * d + used, 0] = size * turn.cos()
            q[head * d + half : head * d + half + used, 0] = -size * turn.sin()
            o[64 + head * slot : 64 + (head + 1) * slot, head * d : head * d + slot] = torch.eye(slot)
        at = "model.layers.1.self_attn."
        q, k, v, o = (small(at + f"{m}_proj.weight") for m in "qkvo")
        still = torch.tensor([*range(half - 16, half), *range(d - 16, d)])  # dimensions that RoPE hardly turns
        slots = [slice(64 + i * slot, 64 + (i + 1) * slot) for i in range(4)]
        for group in range(2):
            number, thing = orthogonal(slot, slot), orthogonal(slot, slot)
            rows = group * d + still
            k[rows, slots[1]] = sharpness**0.5 * number
            k[rows, slots[2]] = sharpness**0.5 * thing
            k[group * d + half - 1, 1] = sink
            v[group * d : (group + 1) * d, :64] = torch.eye(64)
            for head in (2 * group, 2 * group + 1):
                rows = head * d + still
                q[rows, slots[0]] = sharpness**0.5 * number
                q[rows, slots[1]] = sharpness**0.5 * thing
                q[head * d + half - 1, 0] = sink
                o[2:64, head * d + 2 : (head + 1) * d] = 0.75 * torch.eye(62)
        for layer in range(s["layers"]):
            small(f"model.layers.{layer}.mlp.down_proj.weight")
            if layer > 1:
                small(f"model.layers.{layer}.self_attn.o_proj.weight")

    def norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape["eps"]) * self.w(name)

    def turn(self, x):  # [batch, heads, tokens, head_dim]
        half, n = x.shape[-1] // 2, x.shape[-2]
        a, b, cos, sin = x[..., :half], x[..., half:], self.cos[:n], self.sin[:n]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, ids, wanted=None):
        """ids [batch, tokens]; logits [batch, tokens, vocab], or [n, vocab] of the positions of the mask `wanted`."""
        s = self.shape
        n, t = ids.shape
        x = F.embedding(ids, self.w("model.embed_tokens.weight"))
        for layer in range(s["layers"]):
            at = f"model.layers.{layer}."
            y = self.norm(x, at + "input_layernorm.weight")
            q, k, v = (F.linear(y, self.w(at + f"self_attn.{m}_proj.weight")).view(n, t, -1, s["head_dim"]).transpose(1, 2)
                       for m in "qkv")
            q, k = self.turn(q), self.turn(k)
            group = s["heads"] // s["kv_heads"]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(y.transpose(1, 2).reshape(n, t, -1), self.w(at + "self_attn.o_proj.weight"))
            y = self.norm(x, at + "post_attention_layernorm.weight")
            gate = F.silu(F.linear(y, self.w(at + "mlp.gate_proj.weight"))) * F.linear(y, self.w(at + "mlp.up_proj.weight"))
            x = x + F.linear(gate, self.w(at + "mlp.down_proj.weight"))
        if wanted is not None:
            x = x[wanted]
        return F.linear(self.norm(x, "model.norm.weight"), self.w("model.embed_tokens.weight"))
