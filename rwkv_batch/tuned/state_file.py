"""Files of tuned states to tensors. Nothing in them is run, and a file that does not fit is refused by what is wrong with it.

State tuning leaves `blocks.{i}.att.time_state` [H, 64, 64], one for each layer, and nothing else; both shifts start at zero. In
a `.pth` (RWKV-PEFT) rows are values and columns keys, as in our state arrays. `.st` and `.safetensors` come from converters
(RWKV-Runner, web-rwkv) that transpose tensors of this name, so there the axes are swapped back. The matrices are square, so
nothing in a file tells; hence the option.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from rwkv_batch.errors import CheckpointError, Conflict, Unprocessable
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.checkpoint import read_file
from rwkv_batch.model.weights import FILE_DTYPES

SUFFIXES = (".pth", ".st", ".safetensors")
TRANSPOSED = (".st", ".safetensors")
SLACK = 2**20  # bytes of a file beside its tensors
LARGEST_HALF = torch.finfo(torch.float16).max
_NAME = re.compile(r"blocks\.([0-9]{1,4})\.att\.time_state")


class TunedState(NamedTuple):
    """What a file holds.

    wkv         [L, H, 64, 64] fp32, rows are values and columns keys
    key         32 hex digits of its content
    transposed  whether the file's axes were swapped
    """

    wkv: torch.Tensor
    key: str
    transposed: bool


def read_state(file: Path, shape: Shape, *, transpose: bool | None = None, half: bool = False, field: str) -> TunedState:
    """Read a tuned state for a model of `shape`; `half`: it has to fit into fp16.

    Unprocessable, naming `field` and the file, for whatever cannot be used; Conflict when the file changes meanwhile.
    """

    def refused(why: str) -> Unprocessable:
        return Unprocessable(f"{field}: {file.name}: {why}", param=field, code="state_unusable")

    try:
        before = file.stat()
        if before.st_size > shape.num_layers * shape.width * shape.head_size * 4 + SLACK:
            raise refused(f"{before.st_size:,} bytes are more than a state of this model takes")
        tensors = read_file(file)
        wkv = _stacked(tensors, shape, refused)
        after = file.stat()
    except CheckpointError as error:
        raise refused(error.message.replace(f"{file}: ", "").replace(str(file), file.name)) from None
    except OSError as error:
        raise refused(error.strerror or "it cannot be read") from None
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino):
        raise Conflict(f"{field}: {file.name} changed while it was read", param=field, code="file_changed", retry_after=1.0)
    transposed = file.suffix in TRANSPOSED if transpose is None else transpose
    if transposed:
        wkv = wkv.transpose(-1, -2).contiguous()
    low, high = torch.stack(torch.aminmax(wkv)).tolist()
    if not (low > -torch.inf and high < torch.inf):  # NaN fails both
        raise refused("it holds values that are not finite")
    if half and max(-low, high) > LARGEST_HALF:
        raise refused(f"it holds {max(-low, high):g}, which does not fit into fp16; --wkv-state fp32 has room")
    return TunedState(wkv, key_of(wkv), transposed)


def key_of(wkv: torch.Tensor) -> str:
    """What tells a state from others."""
    return hashlib.blake2b(wkv.contiguous().view(-1).view(torch.uint8).numpy(), digest_size=16).hexdigest()


def _stacked(tensors: dict[str, torch.Tensor], shape: Shape, refused: Callable[[str], Unprocessable]) -> torch.Tensor:
    """Return the layers' states in one tensor."""
    layers = {int(found[1]): key for key in tensors if (found := _NAME.fullmatch(key))}
    foreign = sorted(tensors.keys() - set(layers.values()))
    if any(".time_offset" in key for key in foreign):
        raise refused("it holds time_offset, of a kind of tuning that is not supported")
    if not layers:
        raise refused("it holds no time_state, so it is no tuned state")
    if foreign:
        raise refused(f"it holds more than a state: {foreign[0][:64]!r}")
    num_layers, heads = max(layers) + 1, {tuple(tensors[key].shape) for key in layers.values()}
    wanted = (shape.num_heads, shape.head_size, shape.head_size)
    missing = next((i for i in range(num_layers) if i not in layers), None)
    if missing is not None:
        raise refused(f"layer {missing} is missing")
    if num_layers != shape.num_layers or heads != {wanted}:
        theirs = " and ".join(str(list(one)) for one in sorted(heads))
        raise refused(f"it has {num_layers} layers of {theirs}, the model {shape.num_layers} of {list(wanted)}")
    dtypes = {tensors[key].dtype for key in layers.values()} - set(FILE_DTYPES)
    if dtypes:
        raise refused(f"its numbers are {str(dtypes.pop()).removeprefix('torch.')}")
    return torch.stack([tensors[layers[i]].float() for i in range(num_layers)])
