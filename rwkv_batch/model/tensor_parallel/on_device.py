"""Which device is the current one: kernels go to streams of that device only."""

from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device) -> AbstractContextManager:
    """Make a GPU the current one inside `with`; of a CPU there is nothing to say."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
