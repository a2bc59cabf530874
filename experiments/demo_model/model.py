"""A Llama in PyTorch with Hugging Face's parameter names, and the weights with which its training begins."""

import math

import torch
import torch.nn.functional as F

SHAPE = dict(hidden=192, layers=4, heads=4, kv_heads=2, head_dim=64, intermediate=256, theta=1e8, eps=1e-5, context=4096)
OFFSETS = (1, 2, 3, 4)  # distances, in tokens, at which the heads of the first layer attend


class Layers(torch.nn.Module):
    """Named weights, and the decoder layers that they form."""

    def __init__(self, shape, seed):
        super().__init__()
        self.shape, self.names, self.p = shape, {}, torch.nn.ParameterDict()
        self.generator = torch.Generator().manual_seed(seed)
        half = shape["head_dim"] // 2
        self.freqs = shape["theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(shape["context"], dtype=torch.float64), self.freqs)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def add(self, name, tensor):
        key = name.replace(".", "/")
        self.names[name] = key
        self.p[key] = torch.nn.Parameter(tensor)

    def matrix(self, name, rows, columns, scale=1.0):
        self.add(name, torch.randn(rows, columns, generator=self.generator) * scale / math.sqrt(columns))

    def add_layer(self, at):
        h, d, i = (self.shape[n] for n in ("hidden", "head_dim", "intermediate"))
        a, b = self.shape["heads"] * d, self.shape["kv_heads"] * d
        self.matrix(at + "self_attn.q_proj.weight", a, h)
        self.matrix(at + "self_attn.k_proj.weight", b, h)
        self.matrix(at + "self_attn.v_proj.weight", b, h)
        self.matrix(at + "self_attn.o_proj.weight", h, a, 0.5)
        self.matrix(at + "mlp.gate_proj.weight", i, h)
        self.matrix(at + "mlp.up_proj.weight", i, h)
        self.matrix(at + "mlp.down_proj.weight", h, i, 0.25)
        self.add(at + "input_layernorm.weight", torch.ones(h))
        self.add(at + "post_attention_layernorm.weight", torch.ones(h))

    def w(self, name):
        return self.p[name.replace(".", "/")]

    def norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape["eps"]) * self.w(name)

    def turn(self, x, positions):  # x [batch, heads, tokens, head_dim], positions [batch, tokens]: rotary embedding
        half = x.shape[-1] // 2
        a, b, cos, sin = x[..., :half], x[..., half:], self.cos[positions][:, None], self.sin[positions][:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def qkv(self, at, x, positions):
        """Returns q, k and v, each [batch, heads, tokens, head_dim]. A KV head is repeated for each of its query heads."""
        n, t, _ = x.shape
        y = self.norm(x, at + "input_layernorm.weight")
        q, k, v = (F.linear(y, self.w(at + f"self_attn.{m}_proj.weight")).view(n, t, -1, self.shape["head_dim"]).transpose(1, 2)
                   for m in "qkv")
        q, k = self.turn(q, positions), self.turn(k, positions)
        group = self.shape["heads"] // self.shape["kv_heads"]
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def rest(self, at, x, attended):
        """The part of a layer after attention; x is the input of the layer."""
        x = x + F.linear(attended.transpose(1, 2).flatten(2), self.w(at + "self_attn.o_proj.weight"))
        y = self.norm(x, at + "post_attention_layernorm.weight")
        gate = F.silu(F.linear(y, self.w(at + "mlp.gate_proj.weight"))) * F.linear(y, self.w(at + "mlp.up_proj.weight"))
        return x + F.linear(gate, self.w(at + "mlp.down_proj.weight"))


class Llama(Layers):
    def __init__(self, vocab, seed=1, **shape):
        super().__init__({**SHAPE, **shape, "vocab": vocab}, seed)
        h = self.shape["hidden"]
        self.add("model.embed_tokens.weight", torch.randn(vocab, h, generator=self.generator))
        for layer in range(self.shape["layers"]):
            self.add_layer(f"model.layers.{layer}.")
        self.add("model.norm.weight", torch.full((h,), 0.1))

    @torch.no_grad()
    def begin_with_recall(self, bos, no, sharpness=6.0, sink=4.5, seed=2):
        """Writes an induction head into the first two layers before training, which may then change all of it. Without it
        the same training needs several times as many tokens. The dimensions of the residual stream are
        0: a constant, 1: "this is the first token", 2...63: the token, then four slots of 32 for the tokens 1...4 back.

        Layer 0, head n attends to the token n + 1 back: q and k are built from the constant, and RoPE aligns them at that
        distance. It copies a projection of that token into slot n.
        Layer 1 matches facts. At "... box 17 is" the slots 0 and 1 hold "17" and "box"; at the value of a fact, the slots 1
        and 2 hold the number and thing of that fact. q reads the former and k the latter through the same random matrices, so
        they match where both words match, and the token of the value is copied. The key of the first token scores between a
        half match and a whole one: it gets the attention if no fact matches, and its value starts as the embedding of " not"."""
        s, g = self.shape, torch.Generator().manual_seed(seed)
        d, h, half, slot = s["head_dim"], s["hidden"], s["head_dim"] // 2, 32
        assert h == 64 + 4 * slot and s["heads"] == 4 and s["kv_heads"] == 2 and d == 64
        orthogonal = lambda n, m: torch.linalg.qr(torch.randn(m, n, generator=g))[0].T  # n orthonormal rows of length m
        embedding = self.w("model.embed_tokens.weight")
        embedding[:, 64:] *= 0.02
        embedding[:, 0], embedding[:, 1] = 4, 0
        embedding[bos] = embedding[no]
        embedding[bos, 1] = 6
        small = lambda name: self.w(name).mul_(0.1)
        at = "model.layers.0.self_attn."
        q, k, v, o = (small(at + f"{m}_proj.weight") for m in "qkvo")
        used, seen = 12, 4 / math.sqrt((62 + 16) / h)  # RoPE frequencies that locate a distance; the constant after the norm
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
        still = torch.tensor([*range(half - 16, half), *range(d - 16, d)])  # dimensions that RoPE hardly rotates
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

    def embed(self, ids):
        return F.embedding(ids, self.w("model.embed_tokens.weight"))

    def logits(self, normed):
        return F.linear(normed, self.w("model.embed_tokens.weight"))

    def hidden(self, ids, wanted=None):
        """ids [batch, tokens]. Returns the last layer's output after the final norm: [batch, tokens, hidden], or
        [n, hidden] at the positions of the mask `wanted`."""
        x, positions = self.embed(ids), torch.arange(ids.shape[1])[None]
        for layer in range(self.shape["layers"]):
            at = f"model.layers.{layer}."
            x = self.rest(at, x, F.scaled_dot_product_attention(*self.qkv(at, x, positions), is_causal=True))
        return self.norm(x if wanted is None else x[wanted], "model.norm.weight")

    def forward(self, ids, wanted=None):
        return self.logits(self.hidden(ids, wanted))


class Head(Layers):
    """One multi-token prediction layer in the form of DeepSeek-V3. At position p it reads the token x_p and the trunk's output
    (after its final norm) at p - 1, or zeros if that is unknown, and predicts the token after x_p. For the next draft it reads
    its own prediction, and its own output instead of the trunk's."""

    def __init__(self, trunk, seed=1):
        super().__init__(trunk.shape, seed)
        self.trunk = [trunk]  # in a list, so that the trunk's weights are not registered as the head's
        h = self.shape["hidden"]
        self.at = f"model.layers.{self.shape['layers']}."
        self.add_layer(self.at)
        self.matrix(self.at + "eh_proj.weight", h, 2 * h)
        self.add(self.at + "enorm.weight", torch.ones(h))
        self.add(self.at + "hnorm.weight", torch.ones(h))
        self.add(self.at + "shared_head.norm.weight", trunk.w("model.norm.weight").detach().clone())

    @torch.no_grad()
    def begin_with_recall(self, documents, layer=1):
        """Copies the trunk's layer that finds facts (layer 1) into the head, and sets eh_proj to the linear map that best
        predicts that layer's input. The head therefore finds facts before any training."""
        trunk, of = self.trunk[0], f"model.layers.{layer}."
        for name in trunk.names:
            if name.startswith(of):
                self.w(name.replace(of, self.at)).copy_(trunk.w(name))
        squares, products = 0, 0
        for ids in documents:
            x, positions = trunk.embed(ids), torch.arange(ids.shape[1])[None]
            for below in range(layer):
                at = f"model.layers.{below}."
                x = trunk.rest(at, x, F.scaled_dot_product_attention(*trunk.qkv(at, x, positions), is_causal=True))
            both = self.both(ids, one_back(trunk.hidden(ids))).flatten(0, 1)
            squares, products = squares + both.T @ both, products + both.T @ x.flatten(0, 1)
        found = torch.linalg.solve(squares + 1e-4 * squares.trace() / len(squares) * torch.eye(len(squares)), products)
        self.w(self.at + "eh_proj.weight").copy_(found.T)

    def both(self, ids, before):
        return torch.cat((self.norm(self.trunk[0].embed(ids), self.at + "enorm.weight"),
                          self.norm(before, self.at + "hnorm.weight")), -1)

    def enter(self, ids, before):
        return F.linear(self.both(ids, before), self.w(self.at + "eh_proj.weight"))

    def forward(self, ids, before, starts, steps, free=False):
        """ids [batch, tokens]; before [batch, tokens, hidden] is the trunk's output one position earlier. From each position of
        `starts` [batch, m] the head predicts `steps` tokens. It reads the tokens of `ids` in between, or with `free` its own.
        Returns the logits of each step, [batch, m, vocab]. K and V of `ids` need no attention, as each depends on one position."""
        x = self.enter(ids, before)
        q, k, v = self.qkv(self.at, x, torch.arange(ids.shape[1])[None])
        pick = lambda a: a.take_along_dim(starts.view(*starts.shape[:1], *[1] * (a.ndim - 3), -1, 1), -2)
        x, q = pick(x), pick(q)
        later = torch.arange(ids.shape[1]) > starts[..., None]  # [batch, m, tokens]
        own_k, own_v, said = [], [], []
        for step in range(steps):
            scores = (q @ k.transpose(2, 3)).masked_fill(later[:, None], -math.inf)
            scores = torch.cat([scores] + [(q * one).sum(-1, keepdim=True) for one in own_k], -1)
            share = (scores / math.sqrt(q.shape[-1])).softmax(-1)
            attended = share[..., : k.shape[2]] @ v
            for i, one in enumerate(own_v):
                attended = attended + share[..., k.shape[2] + i, None] * one
            y = self.rest(self.at, x, attended)
            said.append(self.trunk[0].logits(self.norm(y, self.at + "shared_head.norm.weight")))
            if step + 1 < steps:
                positions = starts + step + 1
                tokens = said[-1].argmax(-1) if free else ids.gather(1, positions.clamp(max=ids.shape[1] - 1))
                x = self.enter(tokens, y)
                q, new_k, new_v = self.qkv(self.at, x, positions)
                own_k.append(new_k)
                own_v.append(new_v)
        return said


def one_back(hidden):
    """Shifts rows by one position: each position gets the row of the one before it, the first one zeros."""
    return F.pad(hidden, (0, 0, 1, -1))
