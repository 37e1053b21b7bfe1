"""A checkpoint whose answers depend on everything before them, written with few words, so that texts can be cut and joined.

It is a random model that can only say the tokens it is given: `ln_out` makes one channel a constant, and that channel's column
of the head becomes a bias. A text made of WORDS has one tokenisation, however it is cut between two of them.
"""

from pathlib import Path

import torch
from models import TINY, random_tensors

from rwkv_batch.text import tokenizer

MEMORY = 8.0  # how much louder the past is than in a random model
BANNED = -1000.0  # added to the logit of every other token
WORDS = (" water", " garden", " winter", " yellow", " music", " small", "雨", "猫", "鱼", "山", "火", "灯", "雪", "茶", "笔")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz ")  # for the vocabulary of bytes


def write_memory(path: Path, vocab: int = 65536, *, ends: float = 0.0) -> Path:
    """Write such a checkpoint and return its path. `ends` is added to the logit of the end token."""
    words = WORDS if vocab > 256 else LETTERS
    encode = tokenizer.for_vocab(vocab).encode
    ids = [encode(word) for word in words]
    assert all(len(id) == 1 for id in ids), "every word is one token"
    tensors = dict(random_tensors(TINY, vocab, seed=5))
    tensors["ln_out.weight"], tensors["ln_out.bias"] = tensors["ln_out.weight"].clone(), tensors["ln_out.bias"].clone()
    tensors["ln_out.weight"][0], tensors["ln_out.bias"][0] = 0.0, 1.0
    for name in tensors:
        if name.endswith("att.output.weight"):
            tensors[name] = tensors[name] * MEMORY
    head = torch.zeros_like(tensors["head.weight"])
    head[:, 0] = BANNED
    generator = torch.Generator().manual_seed(7)
    for (id,) in ids:
        head[id] = torch.randn(head.shape[1], generator=generator).bfloat16()
        head[id, 0] = 0.0
    head[0], head[0, 0] = torch.randn(head.shape[1], generator=generator).bfloat16(), ends
    tensors["head.weight"] = head
    torch.save(tensors, path)
    return path
