"""Files of adapters for tests, with random numbers, and what each means as a plain formula in float64 numpy.

Shares no code with the project: it judges `rwkv_batch/model/adapters/`.
"""

import json

import numpy as np
import torch
from safetensors.torch import save_file

RANK = 8
MATRICES = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")
HF = {"att.receptance": "attn.r_proj", "att.key": "attn.k_proj", "att.value": "attn.v_proj", "att.output": "attn.o_proj"}


class Draw:
    """Random parts, the same for each seed."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, scale=0.05):
        return torch.randn(*shape, generator=self.generator) * scale


def matrices(model, layers=None):
    """Yield each large matrix's name without `.weight`, and its shape."""
    count = 1 + max(int(key.split(".")[1]) for key in model if key.startswith("blocks."))
    for layer in range(count) if layers is None else layers:
        for name in MATRICES:
            prefix = f"blocks.{layer}.{name}"
            yield prefix, tuple(model[f"{prefix}.weight"].shape)


def lora(model, folder, seed=0, name="a.pth", layers=None):
    """RWKV-PEFT's, alpha unknown."""
    draw, parts = Draw(seed), {}
    for prefix, (outs, ins) in matrices(model, layers):
        parts |= {f"{prefix}.lora_A": draw(RANK, ins), f"{prefix}.lora_B": draw(outs, RANK)}
    torch.save(parts, folder / name)
    return folder / name, lambda w, p, s=2.0: w + s * num(parts[f"{p}.lora_B"]) @ num(parts[f"{p}.lora_A"])


def pissa(model, folder):
    """With its second file; names begin with `model.` there."""
    draw, parts, init = Draw(1), {}, {}
    for prefix, (outs, ins) in matrices(model):
        parts |= {f"{prefix}.lora_A": draw(RANK, ins), f"{prefix}.lora_B": draw(outs, RANK)}
        init |= {f"model.{prefix}.init_lora_A": draw(RANK, ins), f"model.{prefix}.init_lora_B": draw(outs, RANK)}
    torch.save(parts, folder / "rwkv-0.pth")
    torch.save(init, folder / "init_pissa.pth")

    def formula(w, p, s=1.0):
        began = num(init[f"model.{p}.init_lora_B"]) @ num(init[f"model.{p}.init_lora_A"])
        return w - began + s * num(parts[f"{p}.lora_B"]) @ num(parts[f"{p}.lora_A"])

    return folder / "rwkv-0.pth", formula


def dora(model, folder):
    """OpenMOSE's: a magnitude for each input, norms over the outputs."""
    draw, parts = Draw(2), {}
    for prefix, (outs, ins) in matrices(model):
        parts |= {f"{prefix}.lora_A": draw(RANK, ins), f"{prefix}.lora_B": draw(outs, RANK)}
        parts[f"{prefix}.lora_M"] = draw(1, ins).abs() + model[f"{prefix}.weight"].norm(dim=0)
    torch.save(parts, folder / "dora.pth")

    def formula(w, p, s=2.0):
        v = w + s * num(parts[f"{p}.lora_B"]) @ num(parts[f"{p}.lora_A"])
        columns = [
            v[:, i] * num(parts[f"{p}.lora_M"])[0, i] / (np.sqrt((v[:, i] ** 2).sum()) + 1e-6) for i in range(v.shape[1])
        ]
        return np.stack(columns, 1)

    return folder / "dora.pth", formula


def bone(model, folder, rank=24, key="disha"):
    """Two dimensions; 24 divides neither 128 nor 512, so that the last block is partial."""
    draw = Draw(3)
    parts = {f"{prefix}.{key}": draw(rank, outs) for prefix, (outs, _) in matrices(model)}
    torch.save(parts, folder / "bone.pth")

    def formula(w, p, s=1.0):
        w, g = w.copy(), num(parts[f"{p}.{key}"])
        for i in range(w.shape[1]):
            w[:, i] += g[i % rank]
        return w

    return folder / "bone.pth", formula


def bat(model, folder):
    """Three dimensions: a block for each RANK inputs."""
    draw = Draw(4)
    parts = {f"{prefix}.bone": draw(ins // RANK, RANK, RANK) for prefix, (_, ins) in matrices(model)}
    torch.save(parts, folder / "bat.pth")
    return folder / "bat.pth", lambda w, p, s=1.0: blocks(w, num(parts[f"{p}.bone"]), lambda a, b: b)


def hf_lora(model, folder, use_dora=False, **config):
    """HF PEFT's: alpha 12, rank 8; keys alpha 24."""
    draw, parts = Draw(5), {}
    for prefix, (outs, ins) in matrices(model):
        at = hf_name(prefix)
        parts |= {f"{at}.lora_A.weight": draw(RANK, ins), f"{at}.lora_B.weight": draw(outs, RANK)}
        if use_dora:
            parts[f"{at}.lora_magnitude_vector"] = draw(outs).abs() + model[f"{prefix}.weight"].norm(dim=1)
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": 12, "use_dora": use_dora, "alpha_pattern": {"k_proj": 24}, **config}
    path = hf_folder(folder, parts, about)

    def formula(w, p, s=None):
        alpha = 24 if p.endswith("att.key") else 12
        s = s or alpha / (np.sqrt(RANK) if config.get("use_rslora") else RANK)
        v = w + s * num(parts[f"{hf_name(p)}.lora_B.weight"]) @ num(parts[f"{hf_name(p)}.lora_A.weight"])
        if not use_dora:
            return v
        m = num(parts[f"{hf_name(p)}.lora_magnitude_vector"])
        return np.stack([v[o] * m[o] / np.sqrt((v[o] ** 2).sum()) for o in range(len(v))])

    return path, formula


def hf_miss(model, folder, bat=False):
    """HF PEFT's MiSS, in the form of Bone, or with a block for each RANK outputs."""
    draw, parts = Draw(6), {}
    for prefix, (outs, _) in matrices(model):
        parts[f"{hf_name(prefix)}.miss_block"] = draw(outs // RANK, RANK, RANK) if bat else draw(RANK, outs)
    path = hf_folder(folder, parts, {"peft_type": "MISS", "r": RANK, "init_weights": "bat" if bat else True})

    def formula(w, p, s=1.0):
        g = num(parts[f"{hf_name(p)}.miss_block"])
        if bat:
            return blocks(w, g, lambda a, b: a)
        return np.stack([w[:, i] + g[i % RANK] for i in range(w.shape[1])], 1)

    return path, formula


def web_rwkv(model, folder):
    """A transposed; and a whole vector."""
    draw, parts = Draw(7), {}
    for prefix, (outs, ins) in matrices(model):
        parts |= {f"{prefix}.lora.0": draw(ins, RANK), f"{prefix}.lora.1": draw(outs, RANK)}
    save_file(parts, folder / "a.st")
    return folder / "a.st", lambda w, p, s=2.0: w + s * num(parts[f"{p}.lora.1"]) @ num(parts[f"{p}.lora.0"]).T


FORMATS = {
    "LoRA": lora,
    "PiSSA": pissa,
    "DoRA": dora,
    "Bone": bone,
    "Bone of one name": lambda model, folder: bone(model, folder, 32, "bone"),
    "Bat": bat,
    "HF LoRA": hf_lora,
    "HF rsLoRA": lambda model, folder: hf_lora(model, folder, use_rslora=True),
    "HF DoRA": lambda model, folder: hf_lora(model, folder, use_dora=True),
    "HF MiSS": hf_miss,
    "HF Bat": lambda model, folder: hf_miss(model, folder, bat=True),
    "web-rwkv": web_rwkv,
}


def blocks(w, g, which):
    """W[a,b] + W[a,b] G + G, block by block."""
    w, r = w.copy(), g.shape[-1]
    for a in range(w.shape[0] // r):
        for b in range(w.shape[1] // r):
            at = slice(a * r, a * r + r), slice(b * r, b * r + r)
            w[at] = w[at] + w[at] @ g[which(a, b)] + g[which(a, b)]
    return w


def hf_folder(folder, parts, config):
    save_file(parts, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def hf_name(prefix):
    _, layer, name = prefix.split(".", 2)
    return f"base_model.model.model.layers.{layer}.{HF.get(name, name)}"


def num(tensor):
    return tensor.double().numpy()


def changed(model, formula, **options):
    """Return a model's tensors with a formula in place, float64 numpy."""
    wanted = {key: num(tensor) for key, tensor in model.items()}
    for prefix, _ in matrices(model):
        wanted[f"{prefix}.weight"] = formula(wanted[f"{prefix}.weight"], prefix, **options)
    return wanted
