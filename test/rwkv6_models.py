"""Random RWKV-6 checkpoints, and RWKV-6 in float64 numpy written from the equations, one token at a time; nothing is shared."""

import functools

import numpy as np
import torch
from oracle import layer_norm, sigmoid

# layers, width, head size, feed-forward width, rank of a mix, rank of the decay
TINY6 = (2, 128, 64, 448, 32, 64)
SHAPES6 = {"tiny": TINY6, "small heads": (3, 64, 8, 192, 8, 16), "one layer": (1, 64, 64, 224, 16, 8)}


@functools.cache
def random_tensors6(shape: tuple = TINY6, vocab: int = 512, seed: int = 0, decay: float = 2.0) -> dict[str, torch.Tensor]:
    """Return published tensors, bf16; do not change them. `decay`: time_decay lies between -6 and this."""
    layers, c, size, f, rank_mix, rank_decay = shape
    gen = torch.Generator().manual_seed(seed)

    def normal(*dims, std=1.0):
        return (torch.randn(*dims, generator=gen) * std).bfloat16()

    def uniform(*dims, lo=0.0, hi=1.0):
        return (torch.rand(*dims, generator=gen) * (hi - lo) + lo).bfloat16()

    z = {"emb.weight": normal(vocab, c, std=0.05)}
    for i in range(layers):
        p, att, ffn = f"blocks.{i}.", f"blocks.{i}.att.", f"blocks.{i}.ffn."
        for norm in ("ln0", "ln1", "ln2") if i == 0 else ("ln1", "ln2"):
            z |= {p + norm + ".weight": uniform(c, lo=0.8, hi=1.2), p + norm + ".bias": normal(c, std=0.02)}
        z |= {att + f"time_maa_{name}": uniform(1, 1, c) for name in "xwkvrg"}
        z |= {att + "time_maa_w1": normal(c, 5 * rank_mix, std=c**-0.5)}
        z |= {att + "time_maa_w2": normal(5, rank_mix, c, std=0.3 * rank_mix**-0.5)}
        z |= {att + "time_decay": uniform(1, 1, c, lo=-6.0, hi=decay)}
        z |= {att + "time_decay_w1": normal(c, rank_decay, std=c**-0.5)}
        z |= {att + "time_decay_w2": normal(rank_decay, c, std=0.5 * rank_decay**-0.5)}
        z |= {att + "time_faaaa": normal(c // size, size, std=0.5)}
        for name in ("receptance", "key", "value", "gate", "output"):
            z |= {att + f"{name}.weight": normal(c, c, std=0.7 * c**-0.5)}
        z |= {att + "ln_x.weight": uniform(c, lo=0.5, hi=1.0), att + "ln_x.bias": normal(c, std=0.02)}
        z |= {ffn + f"time_maa_{name}": uniform(1, 1, c) for name in "kr"}
        z |= {ffn + "key.weight": normal(f, c, std=c**-0.5), ffn + "receptance.weight": normal(c, c, std=c**-0.5)}
        z |= {ffn + "value.weight": normal(c, f, std=0.3 * f**-0.5)}
    z |= {"ln_out.weight": uniform(c, lo=0.8, hi=1.2), "ln_out.bias": normal(c, std=0.02)}
    z["head.weight"] = normal(vocab, c, std=c**-0.5)
    z["head.weight"][0] = 0
    return z


class Oracle6:
    """One sequence: `step(token)` returns the logits [V] after it."""

    def __init__(self, tensors):
        self.z = {key: np.asarray(value, dtype=np.float64).squeeze() for key, value in tensors.items()}
        self.num_layers = 1 + max(int(key.split(".")[1]) for key in self.z if key.startswith("blocks."))
        self.width = self.z["emb.weight"].shape[1]
        heads, size = tensors["blocks.0.att.time_faaaa"].shape
        self.heads, self.size = int(heads), int(size)
        self.shift = np.zeros((self.num_layers, 2, self.width))
        self.wkv = np.zeros((self.num_layers, self.heads, self.size, self.size))  # [value, key]

    def step(self, token):
        z = self.z
        x = layer_norm(z["emb.weight"][token], z["blocks.0.ln0.weight"], z["blocks.0.ln0.bias"])
        for i in range(self.num_layers):
            p = f"blocks.{i}."
            x = x + self.time_mix(i, layer_norm(x, z[p + "ln1.weight"], z[p + "ln1.bias"]))
            x = x + self.channel_mix(i, layer_norm(x, z[p + "ln2.weight"], z[p + "ln2.bias"]))
        return z["head.weight"] @ layer_norm(x, z["ln_out.weight"], z["ln_out.bias"])

    def time_mix(self, i, x):
        p = f"blocks.{i}.att."
        z = {key[len(p) :]: value for key, value in self.z.items() if key.startswith(p)}
        s = self.shift[i, 0] - x
        self.shift[i, 0] = x
        parts = np.tanh((x + s * z["time_maa_x"]) @ z["time_maa_w1"]).reshape(5, -1)
        x_w, x_k, x_v, x_r, x_g = (
            x + s * (z[f"time_maa_{name}"] + parts[n] @ z["time_maa_w2"][n]) for n, name in enumerate("wkvrg")
        )
        w = np.exp(-np.exp(z["time_decay"] + np.tanh(x_w @ z["time_decay_w1"]) @ z["time_decay_w2"]))
        r, k, v, g = (
            z[name + ".weight"] @ value for name, value in (("receptance", x_r), ("key", x_k), ("value", x_v), ("gate", x_g))
        )
        bonus = z["time_faaaa"].reshape(self.heads, self.size)
        out = np.empty(self.width)
        for h in range(self.heads):
            at = slice(self.size * h, self.size * (h + 1))
            token = np.outer(v[at], k[at])
            y = (self.wkv[i, h] + token * bonus[h]) @ r[at]
            self.wkv[i, h] = self.wkv[i, h] * w[at] + token
            out[at] = layer_norm(y, z["ln_x.weight"][at], z["ln_x.bias"][at], 64e-5)
        return z["output.weight"] @ (out * g * sigmoid(g))

    def channel_mix(self, i, x):
        p = f"blocks.{i}.ffn."
        s = self.shift[i, 1] - x
        self.shift[i, 1] = x
        k = np.maximum(self.z[p + "key.weight"] @ (x + s * self.z[p + "time_maa_k"]), 0) ** 2
        r = sigmoid(self.z[p + "receptance.weight"] @ (x + s * self.z[p + "time_maa_r"]))
        return r * (self.z[p + "value.weight"] @ k)

    def logits(self, tokens):
        """Return [T, V]."""
        return np.stack([self.step(token) for token in tokens])
