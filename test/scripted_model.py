"""A checkpoint that says what a test wants: after each token of a script the next one follows, whatever came before.

Its layers add nothing, so only the last token counts, and the right one leads by far more than noise, penalties and Gumbel
draws can make up. A prompt that ends in a token of no script starts the first one.
"""

from pathlib import Path

import torch
from models import TINY, random_tensors

MARGIN = 64.0  # logit of the right token; of all others about 0
END = 0


def write_scripted(path: Path, scripts: list[list[int]]) -> Path:
    """Write such a checkpoint and return its path."""
    torch.save(scripted_tensors(scripts), path)
    return path


def byte_ids(text: str) -> list[int]:
    """The World ids of single bytes: every character is split as far as it goes."""
    return [byte + 1 for byte in text.encode()]


def scripted_tensors(scripts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return a World-vocabulary checkpoint. Each script is a list of ids; after its last comes the end of text.

    The first begins after any token that is in none; the others begin with a trigger, the last id of a prompt. No id may be
    in two places.
    """
    tensors = dict(random_tensors(TINY, 65536))
    for name in tensors:
        if name.endswith(("att.output.weight", "ffn.value.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    width = tensors["ln_out.weight"].shape[0]
    for name, value in (("blocks.0.ln0", 1.0), ("ln_out", 1.0)):
        tensors[name + ".weight"] = torch.full((width,), value, dtype=torch.bfloat16)
        tensors[name + ".bias"] = torch.zeros(width, dtype=torch.bfloat16)
    ids = [token for script in scripts for token in script]
    assert len(set(ids)) == len(ids) < width - 2, "an id may occur once, and there are fewer directions than dimensions"
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(width, width, generator=generator)
    basis[:, 0] = 1.0  # layer norm takes the mean away, so no other direction may have one
    directions = torch.linalg.qr(basis).Q.T[1:]
    elsewhere, *own = directions[: len(ids) + 1]
    embedding = elsewhere.repeat(65536, 1)
    head = torch.zeros(65536, width)
    head[1:257] = 0.001  # makes no difference, for what it is multiplied with has no mean; but so a grammar can have any byte
    strength = MARGIN / width**0.5  # after layer norm a direction has the length sqrt(width)
    following = {ids[0]: [elsewhere]}
    for token, direction in zip(ids, own, strict=True):
        embedding[token] = direction
    direction_of = dict(zip(ids, own, strict=True))
    for script in scripts:
        for token, after in zip(script, [*script[1:], END], strict=True):
            following.setdefault(after, []).append(direction_of[token])
    for token, before in following.items():
        head[token] = strength * torch.stack(before).sum(0)
    tensors["emb.weight"], tensors["head.weight"] = embedding.bfloat16(), head.bfloat16()
    return tensors
