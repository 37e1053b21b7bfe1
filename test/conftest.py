"""Fixtures every test may use."""

from pathlib import Path

import pytest
import torch
from models import SHARED, TINY, random_tensors

# One thread: the models are tiny, and threads that wait for one another crawl when something else uses a core.
torch.set_num_threads(1)


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
