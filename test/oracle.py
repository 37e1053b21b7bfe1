"""RWKV-7 in float64 numpy, one token at a time, written from the equations; shares no code with the project.

Slow and literal on purpose: it judges `rwkv_batch/model/reference_ops.py`. Works on published tensors as numpy arrays.
"""

import numpy as np


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def layer_norm(x, weight, bias, eps=1e-5):
    return (x - x.mean()) / np.sqrt(x.var() + eps) * weight + bias


class Oracle:
    """One sequence: `step(token)` returns the logits [V] after it."""

    def __init__(self, tensors):
        self.z = {key: np.asarray(value, dtype=np.float64).squeeze() for key, value in tensors.items()}
        self.num_layers = 1 + max(int(key.split(".")[1]) for key in self.z if key.startswith("blocks."))
        self.width = self.z["emb.weight"].shape[1]
        self.heads = self.width // 64
        self.time_shift = np.zeros((self.num_layers, self.width))
        self.channel_shift = np.zeros((self.num_layers, self.width))
        self.wkv = np.zeros((self.num_layers, self.heads, 64, 64))  # [value, key]

    def step(self, token):
        z = self.z
        x = layer_norm(z["emb.weight"][token], z["blocks.0.ln0.weight"], z["blocks.0.ln0.bias"])
        first_value = None
        for i in range(self.num_layers):
            p = f"blocks.{i}."
            normed = layer_norm(x, z[p + "ln1.weight"], z[p + "ln1.bias"])
            out, first_value = self.time_mix(i, normed, first_value)
            x = x + out
            normed = layer_norm(x, z[p + "ln2.weight"], z[p + "ln2.bias"])
            mixed = normed + (self.channel_shift[i] - normed) * z[p + "ffn.x_k"]
            self.channel_shift[i] = normed
            x = x + z[p + "ffn.value.weight"] @ np.maximum(z[p + "ffn.key.weight"] @ mixed, 0) ** 2
        return z["head.weight"] @ layer_norm(x, z["ln_out.weight"], z["ln_out.bias"])

    def time_mix(self, i, x, first_value):
        p = f"blocks.{i}.att."
        z = {key[len(p) :]: value for key, value in self.z.items() if key.startswith(p)}
        difference = self.time_shift[i] - x
        self.time_shift[i] = x
        x_r, x_w, x_k, x_v, x_a, x_g = (x + difference * z["x_" + name] for name in "rwkvag")
        r, k, v = z["receptance.weight"] @ x_r, z["key.weight"] @ x_k, z["value.weight"] @ x_v
        decay = np.exp(-np.exp(-0.5) * sigmoid(z["w0"] + np.tanh(x_w @ z["w1"]) @ z["w2"]))
        rate = sigmoid(z["a0"] + (x_a @ z["a1"]) @ z["a2"])
        gate = sigmoid(x_g @ z["g1"]) @ z["g2"]
        if first_value is None:
            first_value = v
        else:
            v = v + (first_value - v) * sigmoid(z["v0"] + (x_v @ z["v1"]) @ z["v2"])
        removal = k * z["k_k"]
        k = k * (1 + (rate - 1) * z["k_a"])
        out = np.empty(self.width)
        r_k = z["r_k"].reshape(self.heads, 64)
        for h in range(self.heads):
            at = slice(64 * h, 64 * h + 64)
            kk = removal[at] / max(np.linalg.norm(removal[at]), 1e-12)
            state = self.wkv[i, h]
            state = state * decay[at] - np.outer(state @ kk, kk * rate[at]) + np.outer(v[at], k[at])
            self.wkv[i, h] = state
            y = layer_norm(state @ r[at], z["ln_x.weight"][at], z["ln_x.bias"][at], 64e-5)
            out[at] = y + (r[at] * k[at] * r_k[h]).sum() * v[at]
        return z["output.weight"] @ (out * gate), first_value

    def logits(self, tokens):
        """Return [T, V]."""
        return np.stack([self.step(token) for token in tokens])
