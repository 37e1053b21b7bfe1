"""Checkpoint files to tensors as they were published: `.pth` (torch's zip format, without running any code from it),
`.safetensors` and the packed demo model.
"""

import os
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rwkv_batch.config import model_files
from rwkv_batch.errors import CheckpointError, NoMemory
from rwkv_batch.model.packed_file import unpack

MIN_TORCH = (2, 10)  # older unpicklers could be made to corrupt memory (CVE-2026-24747)


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the file meant by `path`, given with or without its suffix; CheckpointError when there is none."""
    path = Path(path)
    candidates = model_files(path)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise CheckpointError(f"{path}: no such checkpoint (looked for {', '.join(c.name for c in candidates)})")


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """Return the file's tensors, memory-mapped where they lie plain; nothing in it is executed. CheckpointError if unusable."""
    try:
        if file.suffix in (".safetensors", ".st"):
            with safe_open(file, framework="pt") as f:
                return {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
        if file.suffix == ".rwkv":  # the packed demo model
            return unpack(file)
        return _read_pth(file)
    except ValueError as error:
        raise CheckpointError(one_line(error)) from None
    except SafetensorError as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({one_line(error)})") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or one_line(error)}") from None
    except RuntimeError as error:
        raise _unreadable(file, error) from None


def version_of(file: Path) -> tuple[int, int, int]:
    """Return what differs when the file was written to or replaced; CheckpointError when it is not there."""
    try:
        found = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or one_line(error)}") from None
    return found.st_size, found.st_mtime_ns, found.st_ino


def check_version(file: Path, version: tuple[int, int, int]) -> None:
    """CheckpointError when the file is not what it was: tensors are read where they lie, so some may be of either version."""
    if version_of(file) != version:
        raise CheckpointError(f"{file}: changed while it was read")


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    """What is told of a file that torch cannot map."""
    if "allocate memory" in str(error):
        return NoMemory(f"{file}: not enough memory to map its {file.stat().st_size:,} bytes")
    kind = "safetensors" if file.suffix in (".safetensors", ".st") else file.suffix
    return CheckpointError(f"{file}: not a readable {kind} file ({one_line(error)})")


def _read_pth(file: Path) -> dict[str, torch.Tensor]:
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < MIN_TORCH:
        raise CheckpointError(f"{file}: torch {torch.__version__} does not read .pth files safely; install torch >= 2.10")
    _check_archive(file)
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(f"{file}: holds more than tensors, nothing in it was run; only plain checkpoints load") from None
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _unreadable(file, error) from None
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{file}: holds a {type(content).__name__} instead of named tensors")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise CheckpointError(f"{file}: entry {str(key)[:80]!r} is no plain tensor")
    return dict(content)


def _check_archive(file: Path) -> None:
    """Refuse what is no complete zip of stored members before torch maps it."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError):  # the second for versions and methods to come
        size = file.stat().st_size
        raise CheckpointError(f"{file}: no complete .pth file (its {size:,} bytes have no zip directory at the end)") from None
    size = file.stat().st_size
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.header_offset + member.file_size > size:
            raise CheckpointError(f"{file}: damaged .pth file (member {member.filename[:80]!r})")


def one_line(text: Exception | str) -> str:
    """An error of a library, short enough to be told."""
    return " ".join(str(text).split())[:200]
