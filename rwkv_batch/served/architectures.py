"""Which architecture a checkpoint is of, by the names of its tensors, and which of them run here."""

from collections.abc import Iterable

from rwkv_batch.errors import CheckpointError

RUNNABLE = {"RWKV-7": "rwkv_batch.model.rwkv7", "RWKV-6": "rwkv_batch.model.rwkv6.forward"}  # modules with a class `Model`
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
