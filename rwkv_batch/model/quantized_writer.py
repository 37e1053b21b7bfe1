"""Writes a checkpoint with quantised matrices, see `quantized_file.py`."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.checkpoint import read_file
from rwkv_batch.model.quantized import Quantisation
from rwkv_batch.model.quantized_file import SCALES, Stored, metadata_of, stored_as
from rwkv_batch.model.tensor_reader import TensorReader
from rwkv_batch.model.weights import check_tensors, fingerprint_of


def write_quantised(source: Path, target: Path, quant: Quantisation, device: torch.device) -> int:
    """Quantise a checkpoint on `device` and write it; returns the bytes of the file.

    CheckpointError where `source` cannot be used, OSError where `target` cannot be written: then what was there is as before.
    """
    if stored_as(source) is not None:
        raise CheckpointError(f"{source}: its matrices are quantised already")
    tensors = read_file(source)
    shape = check_tensors(tensors, str(source), quant=quant)
    stored = Stored(quant, fingerprint_of(tensors))
    kept = _quantised(tensors, shape, str(source), quant, device)
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        draft.touch()
        mode = draft.stat().st_mode  # which the library narrows
        save_file(kept, draft, metadata=metadata_of(stored))
        draft.chmod(mode)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return size


def _quantised(
    tensors: dict[str, torch.Tensor], shape: Shape, name: str, quant: Quantisation, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return what the file holds, on the host; empties `tensors`."""
    matrices, kept = shape.matrices(quant), {}
    with tqdm(total=len(tensors), desc=f"quantising {Path(name).name}", unit="tensor", leave=False, disable=None) as bar:
        reader = TensorReader(tensors, name, torch.float32, device, bar)
        for key in list(tensors):
            if key not in matrices:
                kept[key] = reader.raw(key).contiguous()
                continue
            weight = reader.weight([key], quant.format, transposed=matrices[key]).to("cpu")
            kept[key], kept[key + SCALES] = weight.values, weight.scales
    return kept
