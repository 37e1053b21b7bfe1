"""Random models small enough for two cores, and where things are."""

import functools
from pathlib import Path

import torch

from bench.synth_checkpoint import synth
from rwkv_batch.model import weights

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"  # material beside the repository; a test that wants it skips by name without it

# layers, width, ranks of w, a, v, g, shift of the squared ReLU
TINY = (2, 128, 32, 32, 32, 32, 1.15)
SHAPES = {
    "one head": (1, 64, 8, 16, 8, 24, 0.5),
    "tiny": TINY,
    "wide ranks": (3, 192, 64, 32, 16, 96, 1.15),
}


@functools.cache
def tokenizer_for(vocab: int):
    """Return the tokenizer; the World vocabulary takes half a second to load."""
    from rwkv_batch.text import tokenizer  # what a machine for GPU tests may lack

    return tokenizer.for_vocab(vocab)


@functools.cache
def random_tensors(shape: tuple = TINY, vocab: int = 512, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return published tensors of a random model; do not change them."""
    return synth(shape, vocab=vocab, seed=seed)


@functools.cache
def random_weights(shape: tuple = TINY, vocab: int = 512, seed: int = 0) -> weights.Weights:
    """Return them in compute layout, fp32."""
    return weights.from_tensors(dict(random_tensors(shape, vocab, seed)))
