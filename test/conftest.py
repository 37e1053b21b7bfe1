"""Fixtures every test may use: random checkpoints small enough for two cores."""

import functools
from pathlib import Path

import pytest
import torch

from bench.synth_checkpoint import synth
from rwkv_batch import weights

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"  # material beside the repository; a test that wants it skips by name without it

# layers, width, ranks of w, a, v, g, shift of the squared ReLU
TINY = (2, 128, 32, 32, 32, 32, 1.15)
SHAPES = {
    "one head": (1, 64, 8, 16, 8, 24, 0.5),
    "tiny": TINY,
    "wide ranks": (3, 192, 64, 32, 16, 96, 1.15),
}

# One thread: the models are tiny, and threads that wait for one another crawl when something else uses a core.
torch.set_num_threads(1)


@functools.cache
def random_tensors(shape: tuple = TINY, vocab: int = 512, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return published tensors of a random model; do not change them."""
    return synth(shape, vocab=vocab, seed=seed)


@functools.cache
def random_weights(shape: tuple = TINY, vocab: int = 512, seed: int = 0) -> weights.Weights:
    """Return them in compute layout, fp32."""
    return weights.from_tensors(dict(random_tensors(shape, vocab, seed)))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A random World-vocabulary checkpoint on disk."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.pth"
    torch.save(random_tensors(TINY, 65536), path)
    return path


@pytest.fixture(scope="session")
def real_checkpoint() -> Path:
    """A real checkpoint of others, where it is at hand."""
    path = SHARED / "checkpoints" / "tiny-rwkv-7v0-834K"
    if not path.is_dir():
        pytest.skip("needs the folder checkpoints/tiny-rwkv-7v0-834K beside the repository")
    return path
