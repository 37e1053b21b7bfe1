"""Which architecture a checkpoint is of, by the names of its tensors, and the module that runs it.

Another architecture is a module beside `rwkv7.py` with a class `Model`, and a line in RUNNABLE.
"""

from collections.abc import Iterable
from importlib import import_module

from rwkv_batch.errors import CheckpointError

RUNNABLE = {"RWKV-7": "rwkv_batch.model.rwkv7"}  # modules
MARKS = {  # how a tensor's name ends that no other architecture has
    ".att.r_k": "RWKV-7",
    ".att.time_maa_x": "RWKV-6",
    ".att.time_mix_g": "RWKV-5",
    ".att.time_first": "RWKV-4",
}
NEWEST = "RWKV-7"


def architecture_of(tensors: Iterable[str], name: str) -> str:
    """Return the architecture of a checkpoint with such tensors; CheckpointError, naming it, where it cannot be run.

    A checkpoint without a mark is taken for the newest one: what reads that says what is missing.
    """
    found = next((MARKS[mark] for mark in MARKS if any(key.endswith(mark) for key in tensors)), NEWEST)
    if found not in RUNNABLE:
        raise CheckpointError(f"{name}: an {found} checkpoint; what runs here: {', '.join(RUNNABLE)}")
    return found


def model_class(architecture: str) -> type:
    """Return the `Model` that runs checkpoints of `architecture`."""
    return import_module(RUNNABLE[architecture]).Model
